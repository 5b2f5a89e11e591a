"""Compiling at first use: once, for this user alone, and with a sentence where it cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.kernels.cpu import build

FAKE = """#!/bin/sh
[ "$1" = --version ] && {{ echo fake 1.0; exit; }}
echo compiled >> {log}
{body}
"""
WRITES_OUTPUT = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done'


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes a line a call to `calls` and makes files that are no libraries."""
    return fake_compiler(tmp_path, monkeypatch, WRITES_OUTPUT)


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    path = folder / "fake-c++"
    path.write_text(FAKE.format(log=folder / "calls", body=body))
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_it_compiles_once(compiler: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    made = build.build(folder, "scalar")
    count = calls(tmp_path)
    assert build.build(folder, "scalar") == made
    assert calls(tmp_path) == count
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == sorted([made.name, "lock"])


def test_another_compiler_makes_another_library(compiler: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    made = build.build(folder, "scalar")
    compiler.write_text(compiler.read_text().replace("fake 1.0", "fake 2.0"))
    assert build.build(folder, "scalar") != made


def test_two_processes_compile_once(compiler: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    code = f"from dataplane.kernels.cpu import build; build.build(build.Path({str(folder)!r}), 'scalar')"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=60) for process in running] == [0, 0]
    assert calls(tmp_path) == 1 + len(build.COMMON) + 1


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler was found \(c\+\+, g\+\+, clang\+\+\)"):
        build.build(tmp_path / "c" / "k", "scalar")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.build(tmp_path / "c" / "k", "scalar")


def test_a_compile_that_fails_says_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch, 'echo "note: thinking"; echo "x.cpp:1: error: no such thing" >&2; exit 1')
    with pytest.raises(build.BuildError, match=r"do not compile with .*fake-c\+\+: x.cpp:1: error: no such thing"):
        build.build(tmp_path / "c" / "k", "scalar")
    assert not list((tmp_path / "c" / "k").glob("*.so"))


def test_a_compiler_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_compiler(tmp_path, monkeypatch, "")
    path.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(build.BuildError, match="does not run"):
        build.build(tmp_path / "c" / "k", "scalar")


def test_a_cache_that_cannot_be_written(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(build.BuildError, match="cannot be written"):
        build.build(tmp_path / "file" / "kernels" / "deep", "scalar")


@pytest.mark.parametrize("which", ["parent", "folder", "library"])
def test_what_others_could_have_written_is_not_run(compiler: Path, tmp_path: Path, which: str) -> None:
    folder = tmp_path / "cache" / "kernels"
    made = build.build(folder, "scalar")
    {"parent": folder.parent, "folder": folder, "library": made}[which].chmod(0o777)
    with pytest.raises(build.BuildError, match="another user could have written"):
        build.build(folder, "scalar")


def test_a_folder_that_is_a_link_is_refused(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "kernels").symlink_to(tmp_path / "real")
    with pytest.raises(build.BuildError, match="another user could have written"):
        build.build(tmp_path / "cache" / "kernels", "scalar")


def test_an_instruction_set_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := build.offer()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv(build.CHOICE, "scalar")
    assert build.tier() == "scalar"
    monkeypatch.setenv(build.CHOICE, "abacus")
    assert build.offer() == "TIDEGATE_KERNELS asks for abacus, which this processor does not have"


def test_the_fastest_that_the_processor_has_is_chosen() -> None:
    modern = build.TIERS["avx512"].features
    assert build.choose("", modern | {"sse"}) == "avx512"
    assert build.choose("", modern - {"avx512_vnni"}) == "avx2"
    assert build.choose("", frozenset({"sse", "avx2"})) == "scalar"
    assert build.choose("avx2", modern) == "avx2"
    assert build.choose("", frozenset({"asimd", "asimddp"})) == "neon"
    with pytest.raises(build.BuildError, match="asks for avx512"):
        build.choose("avx512", frozenset({"avx2", "fma", "f16c"}))
