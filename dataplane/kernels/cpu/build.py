"""Compiles the kernels with the system's compiler at first use, and loads them.

Layer: kernel. The library is kept in the user's cache by what it was made of, so that later processes only load it.
It is loaded into the engine, so nothing is run that another user could have written: folder and library belong to this
user alone, or the build is refused. Which instruction set is used is decided by the processor when it is loaded; the
environment variable TIDEGATE_KERNELS names a lower one (avx512, avx2, neon, scalar), as tests do.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "source"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden")
"""Contraction is off so that a sum has the same bits in every instruction set that has the same operations."""

TIERS = {
    "scalar": ("-DTIER_SCALAR",),
    "avx2": ("-DTIER_AVX2", "-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *("-DTIER_AVX512", "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        "-mavx512vnni",
    ),
    "neon": ("-DTIER_NEON", "-march=armv8.2-a+dotprod"),
}
"""What `tier.cpp` is compiled with for each instruction set."""

OF_MACHINE = {
    "x86_64": ("scalar", "avx2", "avx512"),
    "aarch64": ("scalar", "neon"),
    "arm64": ("scalar", "neon"),
}
COMMON = ("pool.cpp", "run.cpp", "choice.cpp", "engine.cpp")
COMPILERS = ("c++", "g++", "clang++")
CHOICE = "TIDEGATE_KERNELS"


class BuildError(Exception):
    """The kernels cannot be had here; the message says why in one sentence."""


class Compiler(NamedTuple):
    """How it is called, and what it calls itself."""

    command: tuple[str, ...]
    version: str


def offer() -> str | None:
    """None if the kernels work on this machine (they are compiled if they were not yet), or else why they do not."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def tier() -> str:
    """The instruction set in use. Raises BuildError where there are no kernels."""
    return library().tier


class Library(NamedTuple):
    """The loaded functions of `source/engine.cpp`, and the instruction set they use."""

    functions: ctypes.CDLL
    tier: str


def library() -> Library:
    """The kernels, compiled at the first call on this machine and loaded at the first in this process."""
    functions = _load(_cache_folder())
    wanted = os.environ.get(CHOICE, "")
    name = functions.tidegate_tier(wanted.encode()).decode()
    if not name:
        raise BuildError(f"{CHOICE} asks for {wanted}, which this processor does not have")
    return Library(functions, name)


@cache
def _load(folder: Path) -> ctypes.CDLL:
    return _declare(ctypes.CDLL(str(build(folder))))


def _declare(functions: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    for name, result, arguments in (
        ("operation_bytes", integer, []),
        ("inputs_bytes", integer, []),
        ("tier", text, [text]),
        ("executor", pointer, [integer, text]),
        ("free_executor", None, [pointer]),
        ("load", pointer, [pointer, integer]),
        ("free_program", None, [pointer]),
        ("run", integer, [pointer, pointer, pointer]),
    ):
        function = getattr(functions, f"tidegate_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


def build(folder: Path) -> Path:
    """The library in `folder`, compiled if it is not there. Of processes that come at once, one compiles."""
    compiler = find_compiler()
    path = folder / f"{_fingerprint(compiler)}.so"
    try:
        _make_private(folder)
        with _locked(folder / "lock"):
            if not path.exists():
                _compile(compiler, folder, path)
    except OSError as error:
        raise BuildError(f"the kernels' cache {folder} cannot be written: {error.strerror}") from error
    _check_private(path)
    return path


def find_compiler() -> Compiler:
    """$CXX if it is set, or else the first that is found."""
    named = os.environ.get("CXX", "")
    candidates = [tuple(shlex.split(named))] if named else [(name,) for name in COMPILERS]
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        try:
            found = subprocess.run(  # noqa: S603 - the user's own compiler
                [*command, "--version"], capture_output=True, text=True, timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(f"the compiler {shlex.join(command)} does not run: {error}") from error
        return Compiler(command, found.stdout)
    raise BuildError(f"no C++ compiler was found ({named or ', '.join(COMPILERS)})")


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "tidegate" / "kernels"


def _fingerprint(compiler: Compiler) -> str:
    digest = hashlib.sha256()
    for part in (*compiler, FLAGS, TIERS, platform.machine()):
        digest.update(repr(part).encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _make_private(folder: Path) -> None:
    """The folder and the one above it, of this user and writable by no other."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    for made in (folder.parent, folder):
        _check_private(made)


def _check_private(path: Path) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"another user could have written {path}; remove it or give it to this user alone")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # goes with the file, whatever happens to the process
        yield


def _compile(compiler: Compiler, folder: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        units = [("tier.cpp", name, TIERS[name]) for name in OF_MACHINE.get(platform.machine(), ("scalar",))]
        units += [(name, name.removesuffix(".cpp"), ()) for name in COMMON]
        objects = [str(Path(scratch) / f"{name}.o") for _, name, _ in units]
        _together(
            [
                [*compiler.command, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", target]
                for (source, _, flags), target in zip(units, objects, strict=True)
            ]
        )
        made = Path(scratch) / "library.so"
        _together([[*compiler.command, "-shared", "-pthread", *objects, "-o", str(made)]])
        made.chmod(0o700)
        made.replace(path)


def _together(commands: list[list[str]]) -> None:
    """Run all at once. Raises BuildError with the first line that names an error."""
    running = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
        for command in commands
    ]
    said = [process.communicate()[0] for process in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            lines = text.strip().splitlines() or [f"status {process.returncode}"]
            first = next((line for line in lines if "error" in line.lower()), lines[0])
            raise BuildError(f"the kernels do not compile with {commands[0][0]}: {first}")
