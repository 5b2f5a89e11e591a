"""The whole bench between scripted servers: turns, keys, peers that fail, and what is left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from controlplane.cli import main
from dataplane.bench import cli
from dataplane.bench.engine import bench as bench_module
from dataplane.bench.engine import server as server_module
from dataplane.bench.engine.bench import Asked, Outcome, run
from dataplane.bench.engine.peers import llama_cpp
from dataplane.bench.engine.peers.setting import Prepare, Setting
from dataplane.bench.engine.server import Launch
from dataplane.bench.engine.workloads import MAKERS, Arrivals
from dataplane.bench.errors import BenchError, NotToBeHadError, SideError
from dataplane.bench.processes import tree
from dataplane.bench.report import document_of
from tests.dataplane.bench.engine.conftest import Start, launch_of
from tests.dataplane.bench.engine.scripted import ROOT
from tests.factories.models import tiny_config, write_safetensors


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_position_embeddings=2048)
    folder = write_safetensors(tmp_path_factory.mktemp("models") / "tiny", config)
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ours(*flags: str) -> bench_module.Ours:
    def prepare(setting: Setting, own: Sequence[str], name: str) -> Launch:
        return launch_of(name, *flags, *own)

    return prepare


def peer(name: str, *flags: str) -> Prepare:
    return lambda setting: launch_of(name, *flags)


def test_what_the_command_line_offers_is_what_there_is() -> None:
    """It names them itself, so that `--help` loads no bench."""
    assert tuple(MAKERS) == cli.LOADS
    assert set(llama_cpp.FORMATS) == set(cli.PEER_FORMATS)
    assert {*bench_module.PEERS, bench_module.SELF} == set(cli.PEERS)


def nowhere(setting: Setting) -> Launch:
    raise NotToBeHadError("cannot install nowhere: no such package")


def measure(
    tiny: Path,
    peers: dict[str, Prepare],
    only: Sequence[str] = ("w1",),
    own: tuple[str, ...] = (),
    pairs: int = 2,
    against: Sequence[str] = (),
) -> Outcome:
    asked = Asked(
        model=str(tiny),
        only=only,
        against=against or list(peers),
        pairs=pairs,
        quick=True,
        ours=ours(*own),
        peers=peers,
    )
    return run(asked, Console(file=io.StringIO()))


def test_every_load_has_the_keys_that_are_documented(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(MAKERS, dict)
    monkeypatch.setitem(MAKERS, "w5", lambda _: Arrivals(4, 16, 4, low_rate=20.0))
    outcome = measure(tiny, {"slow": peer("slow", "--gap", "0.01")}, only=(), pairs=1)
    document = document_of(outcome.report)
    found = document["results"]["against"]["slow"]
    assert set(found) == {"w1", "w2", "w3_equal", "w3_mixed", "w4", "w5", "setup", "version"}
    units = {"w1": "tok/s", "w2": "tok/s", "w3_equal": "tok/s", "w3_mixed": "tok/s", "w4": "s", "w5": "s"}
    for load, unit in units.items():
        result = found[load]
        assert {"ours", "peer", "ratio", "ratio_lower", "figures", "order", "idle_share"} <= set(result)
        assert result["unit"] == unit
        assert result["ratio"] > 1.2, f"ours is quicker in {load}"
        assert result["ratio_lower"] is None, "one pair has no interval"
    assert found["w4"]["figures"]["warm_over_cold"]["ours"] == pytest.approx(1.0, abs=0.9)
    assert found["w5"]["half_rate_per_s"] > 0
    assert found["w1"]["ours"] == pytest.approx(found["w1"]["ratio"] * found["w1"]["peer"])
    assert found["setup"] == {"ours": {"dtype": "none"}, "peer": {"dtype": "none"}}
    assert set(found["w5"]["figures"]) == {
        f"{rate}_{what}" for rate in ("half", "low") for what in ("ttft_p99_s", "tpot_median_s")
    }
    assert document["case"]["lengths"]["w1"] == {"requests": 1, "prompt": 64, "output": 32}
    assert len(document["results"]["case_sha256"]) == 64
    assert (outcome.missing, outcome.failed) == ({}, {})


def test_sides_take_turns_and_get_the_same_tokens_once(tiny: Path, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    flags = ("--diary", str(diary))
    outcome = measure(tiny, {"peer": peer("peer", *flags)}, own=flags, pairs=4)
    turns = ["tidegate", "peer", "peer", "tidegate"] * 2
    assert outcome.report.results["against"]["peer"]["w1"]["order"] == turns
    lines = [line.partition(" ") for line in diary.read_text().splitlines()]
    assert [name for name, _, _ in lines] == ["tidegate", "peer", *turns], "each warms up once"
    prompts = [tuple(json.loads(body)["prompt"]) for _, _, body in lines]
    assert prompts[2::2] == prompts[3::2], "the two turns of a pair ask the same"
    assert len(set(prompts)) == 2 + 4, "and nothing is asked again"


def test_the_control_is_ours_beside_ours(tiny: Path) -> None:
    outcome = measure(tiny, {}, pairs=7, against=["self"])
    found = outcome.report.results["against"]["self"]["w1"]
    assert found["ratio_lower"] < found["ratio"] < found["ratio_upper"]
    assert 0.6 < found["ratio"] < 1.6, "no gain"
    assert set(found["order"]) == {"tidegate", "self"}


def test_without_peers_the_engine_is_measured_alone(tiny: Path) -> None:
    asked = Asked(model=str(tiny), only=("w1",), pairs=3, quick=True, ours=ours())
    found = run(asked, Console(file=io.StringIO())).report.results["ours"]
    assert found["w1"]["pairs"] == 3
    assert found["w1"]["ours"] > 0


def test_a_peer_that_fails_or_is_missing_is_said_and_the_others_go_on(tiny: Path) -> None:
    peers = {
        "nowhere": nowhere,
        "early": peer("early", "--short", "3"),
        "mortal": peer("mortal", "--die-after", "2"),
        "broken": peer("broken", "--no-such-flag"),
        "good": peer("good"),
    }
    outcome = measure(tiny, peers)
    assert outcome.missing["nowhere"] == "cannot install nowhere: no such package"
    assert "broken ended when it was started" in outcome.missing["broken"]
    assert outcome.failed["early"] == "w1: early made 29 tokens where 32 were asked for"
    assert outcome.failed["mortal"].startswith("w1: mortal ended with 7 while it was measured")
    results = outcome.report.results["against"]
    assert results["early"]["w1"] == {"failed": "early made 29 tokens where 32 were asked for"}
    assert results["nowhere"] == {"missing": outcome.missing["nowhere"]}
    assert results["good"]["w1"]["ratio"] > 0
    assert {"tidegate", "good"} <= set(outcome.report.case["flags"])


def test_a_load_that_fails_leaves_the_others_figures(tiny: Path) -> None:
    outcome = measure(tiny, {"mortal": peer("mortal", "--die-after", "3")}, only=("w1", "w2"), pairs=2)
    found = outcome.report.results["against"]["mortal"]
    assert found["w1"]["ratio"] > 0
    assert set(found["w2"]) == {"failed"}
    assert outcome.failed["mortal"].startswith("w2: mortal ")
    assert [table.title for table in outcome.report.tables] == ["Beside mortal", "Not measured: failed"]


def test_a_side_that_computes_out_of_turn_is_no_peer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SETTLE_S", 0.6)
    idle, busy = start("idle"), start("busy", "--busy")
    idle.settle()
    with pytest.raises(SideError, match="busy computes although it was asked for nothing"):
        busy.settle()


def test_a_server_that_shows_everything_at_the_end_does_not_stream(tiny: Path) -> None:
    outcome = measure(tiny, {"hoarder": peer("hoarder", "--at-once")})
    assert outcome.failed["hoarder"] == "w1: hoarder showed all of its tokens at once: it does not stream"


def test_an_unknown_peer_is_refused_before_anything_starts(tiny: Path) -> None:
    with pytest.raises(BenchError, match="there is no peer x; known are y, self"):
        run(Asked(model=str(tiny), against=["x"], peers={"y": nowhere}), Console(file=io.StringIO()))


INTERRUPTED = """
import io, sys
from pathlib import Path
from rich.console import Console
from dataplane.bench.engine.bench import Asked, run
from tests.dataplane.bench.engine.test_bench import ours, peer
model, diary = sys.argv[1:]
flags = ("--gap", "30", "--diary", diary)
run(Asked(model=model, only=("w1",), against=["peer"], quick=True, ours=ours(*flags), peers={"peer": peer("peer")}),
    Console(file=io.StringIO()))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_servers_and_removes_what_was_made(tiny: Path, tmp_path: Path, number: signal.Signals) -> None:
    diary, scratch = tmp_path / "diary", tmp_path / "scratch"
    os.mkfifo(diary)
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tiny), str(diary)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
    )
    with diary.open() as requests:
        assert requests.readline().startswith("tidegate ")
        started = tree(process.pid)[1:]
        assert len(started) >= 2, "both servers run"
        assert list(scratch.iterdir())
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert [pid for pid in started if tree(pid)] == []
    assert list(scratch.iterdir()) == []


def test_the_command_says_what_is_wrong_in_one_sentence(tiny: Path, tmp_path: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        ran = CliRunner().invoke(main, ["bench", "engine", "--model", str(tiny), *arguments])
        return ran.exit_code, ran.output

    code, output = said("--only", "w1,w9")
    assert (code, "there is no load w9" in output) == (2, True)
    code, output = said("--ours-flag=--no-such-flag=1")
    assert (code, "has no --no-such-flag in this build" in output) == (2, True)
    code, output = said("--peer-format", "q4_0")
    assert (code, "--peer-format needs --against llama.cpp" in output) == (2, True)
    path = tmp_path / "result.json"
    code, output = said("--against", "llama.cpp", "--json", str(path))
    assert (code, "llama.cpp reads GGUF files, and tiny is none" in output) == (10, True)
    assert "missing" in json.loads(path.read_text())["results"]["against"]["llama.cpp"]
