"""How each side is started, and environments that are thrown away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataplane.bench.engine.peers import llama_cpp, ours
from dataplane.bench.engine.peers.setting import Setting
from dataplane.bench.environment import Environments, run
from dataplane.bench.errors import BenchError, NotToBeHadError


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    environments = Environments(tmp_path / "environments", lambda _: None)
    return Setting(model, longest=1280, seats=32, threads=2, folder=tmp_path, environments=environments)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def built(setting: Setting) -> Path:
    """An environment in which llama.cpp has been built before: its quantiser notes what it was asked."""
    home = setting.environments.folder / llama_cpp.NAME
    program(
        home / "build" / "bin" / "llama-quantize",
        '#!/bin/sh\nfor last; do target=$kept; kept=$last; done\necho "$@" >> "$(dirname "$0")/asked"\n: > "$target"\n',
    )
    setting.environments.finished(llama_cpp.NAME, [llama_cpp.PACKAGE, llama_cpp.VERSION, *llama_cpp.BUILD])
    return home / "build" / "bin"


def test_our_engine_is_given_its_flags_and_what_all_sides_are_given(setting: Setting) -> None:
    flags = ours.flags_of({"--threads": "1", "--max-num-seqs": None}, ["--block-size=8"])
    assert flags == ("--threads=1", "--block-size=8")
    launch = ours.prepare(setting, flags)
    command = " ".join(launch.command)
    assert "--threads 2" in command
    assert command.endswith("--max-model-len 1280 --threads=1 --block-size=8"), "what is asked for comes last"
    assert launch.setup["flags"] == "--threads=1 --block-size=8"
    assert launch.environment["TIDEGATE_INTERNAL_TOKEN"] == launch.endpoint.token
    assert launch.endpoint.token not in command


def test_a_flag_that_this_build_does_not_have_is_refused() -> None:
    with pytest.raises(BenchError, match="no --no-such-flag in this build"):
        ours.flags_of({"--no-such-flag": "x"}, [])
    assert ours.flags_of({"--no-such-flag": None}, []) == ()


def test_llama_cpp_makes_its_weights_from_float32_and_once(setting: Setting) -> None:
    programs = built(setting)
    for _ in range(2):
        launch = llama_cpp.prepare(setting)
    asked = (programs / "asked").read_text().splitlines()
    whole, target = setting.folder / "m-f32.gguf", setting.folder / "m-q4_0.gguf"
    assert asked == [f"--allow-requantize {setting.model} {whole} F32", f"{whole} {target} Q4_0"]
    command = " ".join(launch.command)
    assert f"--model {target}" in command
    assert "--parallel 32 --ctx-size 40960 --threads 2" in command
    assert launch.setup["dtype"] == "weights q4_0, KV float16"


def test_the_shipped_file_is_served_as_it_is(setting: Setting) -> None:
    programs = built(setting)
    shipped = Setting(setting.model, 1280, 32, 2, setting.folder, setting.environments, "shipped")
    assert str(setting.model) in llama_cpp.prepare(shipped).command
    assert not (programs / "asked").exists()


def test_an_environment_that_was_broken_off_is_made_anew_and_a_finished_one_is_not(tmp_path: Path) -> None:
    environments = Environments(tmp_path, lambda _: None)
    (tmp_path / "peer").mkdir()
    assert not environments.has("peer", ["a==1"])
    environments.finished("peer", ["a==1"])
    assert environments.has("peer", ["a==1"])
    assert not environments.has("peer", ["a==2"])
    assert environments.python("peer", ["a==1"]) == tmp_path / "peer" / "bin" / "python"


def test_a_command_that_fails_is_one_sentence() -> None:
    with pytest.raises(NotToBeHadError, match=r"^cannot install x: no matching distribution$"):
        run(["sh", "-c", "echo no matching distribution >&2; echo WARNING: more >&2; exit 1"], "install x")
    with pytest.raises(NotToBeHadError, match="cannot find it"):
        run([f"{os.sep}no{os.sep}such"], "find it")
    assert run(["echo", "yes"], "say yes") == "yes"
