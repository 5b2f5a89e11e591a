"""`tidegate bench roofline` on a tiny model: every part runs, the hits are real, and the control is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from controlplane.cli import main
from dataplane.bench.engine_ttft import DECODED, EngineBench
from dataplane.hardware.figure import FigureKind
from dataplane.hardware.geometry import StepSize
from dataplane.hardware.hit_area import area_saved
from dataplane.hardware.stepmodel import MeasuredStep, StepModel
from tests.factories.models import tiny_config, write_safetensors


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    folder = write_safetensors(tmp_path_factory.mktemp("models") / "tiny", config)
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_whole_bench_runs_and_writes_what_its_docstring_says(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "roofline.json"
    arguments = ["bench", "roofline", "--model", str(tiny), "--prompt", "96", "--repeats", "1", "--threads", "1"]
    ran = CliRunner().invoke(main, [*arguments, "--probe-seconds", "0.05", "--json", str(path)])
    assert ran.exit_code == 0, ran.output
    results = json.loads(path.read_text())["results"]
    assert results["kv_bytes_per_token"]["DeepSeek-V3"] == 70_272
    assert round(results["devices"]["H200 SXM 141 GB"]["critical_batch"]) == 206
    cpu = results["cpu"]
    assert cpu["violations"] == 0
    assert cpu["violations_before"] <= len(cpu["dropped"])
    assert all(row["seconds"] > 0 for row in cpu["operators"].values())
    # x, W and y of one product in fp32, two FLOPs for each weight.
    moved = 4 * (64 * 128 + 64 + 128)
    assert cpu["operators"]["linear 1 x 64 → 128"]["intensity"] == pytest.approx(2 * 64 * 128 / moved)
    assert cpu["critical_batch_fp32"] == pytest.approx(2 * cpu["balance"])
    assert results["loading"]["copies"] == cpu["bandwidth"] / 2
    assert results["loading"]["pays"] == (results["loading"]["copies"] > results["loading"]["pays_from"] > 0)
    assert [hit["ratio"] for hit in results["engine"]["hits"]] == [0.0, 0.3, 0.6, 0.9]
    assert all(1.0 <= hit["gain_predicted"] <= hit["gain_bound"] for hit in results["engine"]["hits"])
    assert "TTFT of the engine with prefix hits" in ran.output


def test_hits_are_measured_on_the_real_engine_and_predicted_from_prompts_without_any(tiny: Path) -> None:
    """So small a model takes hardly longer for a prompt than for nothing; planted steps show how much is credited."""
    bench = EngineBench(str(tiny), prompt=96, threads=1, seed=4)
    result = bench.run((0.0, 0.5, 0.9), repeats=2)
    cold, half, most = result.hits
    assert [hit.cached for hit in result.hits] == [0, 48, 80], "whole blocks of 16"
    assert half.saved == pytest.approx(area_saved(0.5, result.kappa))
    assert cold.by_area == cold.ttft.median
    assert cold.by_area >= half.by_area >= most.by_area
    assert cold.by_steps >= half.by_steps >= most.by_steps
    assert cold.gain_predicted == cold.gain_measured == 1.0
    assert 1.0 <= half.gain_predicted <= most.gain_predicted
    assert all(hit.tpot.n == hit.ttft.n == 2 and hit.tpot.least > 0 for hit in result.hits)
    figures = result.model.coefficients.values()
    assert all(figure.kind is FigureKind.CALIBRATED and "without hits" in figure.source for figure in figures)
    assert bench.llm.core.stats().counters.memory.prefix_hits == 2 * (48 + 80)
    bench.llm.core.check_integrity()


def test_the_control_is_no_part_of_any_prediction(tiny: Path) -> None:
    """Decode twice as slow changes what the device has left to gain, and neither prediction of TTFT."""
    bench = EngineBench(str(tiny), prompt=96, threads=1, seed=4)
    sizes = [StepSize.prefill(n) for n in (8, 32, 96)] + [StepSize.decode([40] * b) for b in (1, 4, 8)]
    steps = [MeasuredStep(size, 0.1 + 0.01 * size.tokens) for size in sizes]
    model = StepModel.fit(steps, "planted", ("step", "tokens"))

    def hits(tpot: float) -> list[tuple[float, float, float, float]]:
        measured = {0.0: [(1.0, tpot)], 0.9: [(0.3, tpot)]}
        compared = bench._compare(model, model.residuals, (0.0, 0.9), measured)
        return [(hit.by_area, hit.by_steps, hit.gain_predicted, hit.gain_bound) for hit in compared.hits]

    quick, slow = hits(0.01), hits(0.02)
    assert [hit[:2] for hit in quick] == [hit[:2] for hit in slow]
    assert quick[0][0] > quick[1][0], "a hit is credited to TTFT"
    assert quick[0][1] > quick[1][1]
    assert quick[1][2] > slow[1][2] > 1.0, "the more of the time is decode, the less a hit is worth"
    # By hand: 0.1 s of the prefill is for no token, so that a hit can save 0.9 of 1.16 s at most.
    assert quick[1][3] == pytest.approx(1.16 / 0.26)
    assert slow[1][3] < quick[1][3]
    assert DECODED > 1


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    runner = CliRunner()
    ran = runner.invoke(main, ["bench", "roofline", "--model", str(tmp_path / "none"), "--threads", "1"])
    assert ran.exit_code == 2
    assert "there is no model at" in ran.output
    ran = runner.invoke(main, ["bench", "roofline", "--tables", str(tmp_path), "--no-engine"])
    assert ran.exit_code == 2
    assert "there is none of h200_gemm_perf.parquet" in ran.output


def test_the_group_says_what_it_is_for() -> None:
    ran = CliRunner().invoke(main, ["bench", "--help"])
    assert ran.exit_code == 0
    assert "control that must show no gain" in " ".join(ran.output.split())
    assert "roofline" in ran.output
