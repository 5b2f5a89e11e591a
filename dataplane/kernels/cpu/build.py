"""Compiles the kernels with the system's compiler at first use, and loads them.

Layer: kernel. The library is kept in the user's cache by what it was made of, so that later processes only load it.
It is loaded into the engine, so nothing is run that another user could have written: folder and library belong to this
user alone, or the build is refused. Each instruction set has a library of its own, made when a processor first wants
it; the environment variable TIDEGATE_KERNELS names a lower one (avx512, avx2, neon, scalar), as tests do.
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


class Tier(NamedTuple):
    """An instruction set: what the system must say of the processor, and what `tier.cpp` is compiled with."""

    features: frozenset[str]
    flags: tuple[str, ...]


AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
TIERS = {
    "avx512": Tier(
        frozenset(("avx2", "fma", "f16c", *(name.replace("512vnni", "512_vnni") for name in AVX512))),
        ("-DTIER_AVX512", "-mavx2", "-mfma", "-mf16c", *(f"-m{name}" for name in AVX512)),
    ),
    "avx2": Tier(frozenset(("avx2", "fma", "f16c")), ("-DTIER_AVX2", "-mavx2", "-mfma", "-mf16c")),
    "neon": Tier(frozenset(("asimd", "asimddp")), ("-DTIER_NEON", "-march=armv8.2-a+dotprod")),
    "scalar": Tier(frozenset(), ("-DTIER_SCALAR",)),
}
"""The fastest first. Features as Linux names them in /proc/cpuinfo, which lists those that it lets programs use."""

COMMON = ("pool.cpp", "run.cpp", "engine.cpp")
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
    name = choose(os.environ.get(CHOICE, ""), processor())
    return Library(_load(_cache_folder(), name), name)


def choose(wanted: str, features: frozenset[str]) -> str:
    """The fastest instruction set of a processor with `features`, or the one that is wanted."""
    for name, tier in TIERS.items():
        if wanted in ("", name) and tier.features <= features:
            return name
    raise BuildError(f"{CHOICE} asks for {wanted}, which this processor does not have")


@cache
def processor() -> frozenset[str]:
    """What the system says that its processors can do; nothing where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(next((value for name, _, value in lines if name.strip() in ("flags", "Features")), "").split())


@cache
def _load(folder: Path, tier: str) -> ctypes.CDLL:
    return _declare(ctypes.CDLL(str(build(folder, tier))))


def _declare(functions: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("operation_bytes", integer, []),
        ("inputs_bytes", integer, []),
        ("executor", pointer, [integer]),
        ("free_executor", None, [pointer]),
        ("load", pointer, [pointer, integer]),
        ("free_program", None, [pointer]),
        ("run", integer, [pointer, pointer, pointer]),
    ):
        function = getattr(functions, f"tidegate_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


def build(folder: Path, tier: str) -> Path:
    """The library of an instruction set in `folder`, made if it is not there. Of processes that come at once, one does.

    Raises BuildError.
    """
    compiler = find_compiler()
    path = folder / f"{_fingerprint(compiler)}-{tier}.so"
    try:
        _make_private(folder)
        with _locked(folder / "lock"):
            if not path.exists():
                _compile(compiler, tier, path)
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
    for part in (*compiler, FLAGS, sorted((name, tier.flags) for name, tier in TIERS.items()), platform.machine()):
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


def _compile(compiler: Compiler, tier: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        units = [("tier.cpp", TIERS[tier].flags), *((name, ()) for name in COMMON)]
        objects = [str(Path(scratch) / f"{source}.o") for source, _ in units]
        _together(
            [
                [*compiler.command, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", target]
                for (source, flags), target in zip(units, objects, strict=True)
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
    for command, process, text in zip(commands, running, said, strict=True):
        if process.returncode:
            lines = text.strip().splitlines() or [f"status {process.returncode}"]
            first = next((line for line in lines if "error" in line.lower()), lines[0])
            raise BuildError(f"the kernels do not compile with {command[0]}: {first}")
