"""A backup on disk: one tar with a manifest that says what is in it, by size and checksum.

Layer: service. Reads only what the manifest names and nothing by a path that the archive chose; a file that is not what
was written is refused before anything of it is used.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Annotated

import msgspec

from controlplane.local.errors import ExitCode, LocalError, from_os_error

FORMAT = 1
MANIFEST = "manifest.json"
DUMP = "database.dump"
MAX_MANIFEST = 64 * 1024
PIECE = 1024 * 1024


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a backup."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup is. `postgres` is the server's version in numbers, `revision` the database's migration, `parts` go
    by name.
    """

    format: int
    tidegate: str
    postgres: Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)*$")]
    revision: str
    made_at: float
    secrets: bool
    parts: dict[str, Part]


def digest(path: Path) -> Part:
    """Size and checksum of a file."""
    with path.open("rb") as stream:
        return Part(size=path.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())


def write_archive(target: Path, manifest: Manifest, files: Mapping[str, Path]) -> None:
    """Write `target`, mode 600, in one step: it is whole, on disk and checked before it has its name.

    Raises LocalError; `target` must not exist.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=".tidegate-backup-", dir=target.parent))
    except OSError as error:
        raise from_os_error(error, "write", target) from None
    fresh = folder / target.name  # nobody else can have put a file or a link of theirs there
    try:
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w+b") as stream:
            os.fchmod(descriptor, 0o600)
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
                _add_bytes(tar, msgspec.json.encode(manifest))
                for name, path in files.items():
                    with path.open("rb") as content:
                        tar.addfile(_entry(name, path.stat().st_size), content)
            stream.flush()
            os.fsync(descriptor)
        check_archive(fresh)
        os.link(fresh, target)
    except FileExistsError:
        raise LocalError(f"{target} exists already; name another file", ExitCode.USAGE) from None
    except OSError as error:
        raise from_os_error(error, "write", target) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _add_bytes(tar: tarfile.TarFile, content: bytes) -> None:
    tar.addfile(_entry(MANIFEST, len(content)), io.BytesIO(content))


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o600, int(time.time())
    return entry


def check_archive(path: Path) -> Manifest:
    """The manifest of a backup whose every part is what it says. Raises LocalError."""
    return unpack(path, None, ())


def unpack(path: Path, folder: Path | None, wanted: tuple[str, ...]) -> Manifest:
    """Check every part of the backup and write the `wanted` ones into `folder`, mode 600, by their last name.

    Raises LocalError for what is no backup, one of a newer format, or a damaged one.
    """
    try:
        with path.open("rb") as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            manifest = _manifest(tar, path)
            left = dict(manifest.parts)
            while (entry := tar.next()) is not None:
                expected = left.pop(entry.name, None)
                if expected is None or not entry.isreg() or entry.size != expected.size:
                    raise _damaged(path)
                content = tar.extractfile(entry)
                assert content is not None  # it is a regular file
                target = folder / Path(entry.name).name if folder is not None and entry.name in wanted else None
                if _copied(content, target) != expected.sha256:
                    raise _damaged(path)
            if left:
                raise _damaged(path)
    except (tarfile.TarError, EOFError):
        raise _damaged(path) from None
    except OSError as error:
        raise from_os_error(error, "read", path, ExitCode.USAGE) from None
    return manifest


def _manifest(tar: tarfile.TarFile, path: Path) -> Manifest:
    first = tar.next()
    if first is None or first.name != MANIFEST or not first.isreg() or first.size > MAX_MANIFEST:
        raise LocalError(f"{path} is no backup of Tidegate", ExitCode.DAMAGED)
    content = tar.extractfile(first)
    assert content is not None  # it is a regular file
    try:
        manifest = msgspec.json.decode(content.read(), type=Manifest)
    except msgspec.MsgspecError:
        raise _damaged(path) from None
    if manifest.format > FORMAT:
        raise LocalError(
            f"{path} was made by a newer Tidegate ({manifest.tidegate}); restore it with that", ExitCode.USAGE
        )
    return manifest


def _copied(content: IO[bytes], target: Path | None) -> str:
    """The checksum of what was read, written to `target` when there is one."""
    checksum = hashlib.sha256()
    stream = None
    if target is not None:
        stream = os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    try:
        while piece := content.read(PIECE):
            checksum.update(piece)
            if stream is not None:
                stream.write(piece)
    finally:
        if stream is not None:
            stream.close()
    return checksum.hexdigest()


def _damaged(path: Path) -> LocalError:
    return LocalError(f"{path} is damaged: it is not what was written as a backup; use another one", ExitCode.DAMAGED)
