"""What a prefix hit saves: against the areas themselves, the public traces, and published thresholds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dataplane.hardware.geometry import DEEPSEEK_V3, LLAMA_3_1_8B, StepSize, totals
from dataplane.hardware.hit_area import (
    FirstToken,
    amdahl_bound,
    area_saved,
    capacity_gain,
    hit_tokens,
    trace_saving,
    worth_loading,
)

TRACES = Path(__file__).parents[4] / "shared" / "traces" / "mooncake"


@pytest.mark.parametrize(
    ("matched", "prompt", "expected"),
    [(0, 100, 0), (15, 100, 0), (16, 100, 16), (100, 100, 96), (64, 64, 48), (65, 65, 64), (16, 16, 0), (1, 1, 0)],
)
def test_a_hit_is_whole_blocks_and_leaves_one_token(matched: int, prompt: int, expected: int) -> None:
    assert hit_tokens(matched, prompt, 16) == expected


@pytest.mark.parametrize("prompt", [256, 4096, 65536])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.6, 0.9])
def test_the_saved_share_is_that_of_the_flops(prompt: int, ratio: float) -> None:
    model = LLAMA_3_1_8B
    cached = hit_tokens(int(ratio * prompt), prompt, 16)
    cold, _ = totals(model.step(StepSize.prefill(prompt, rows=0)))
    warm, _ = totals(model.step(StepSize.prefill(prompt - cached, cached, rows=0)))
    kappa = model.kappa_per_token * prompt
    assert kappa == pytest.approx(model.layers * model.heads * model.head_dim * prompt / model.active_parameters)
    assert area_saved(cached / prompt, kappa) == pytest.approx(1 - warm / cold, abs=1 / prompt)


def test_latent_attention_saves_what_a_decompressed_prefill_does() -> None:
    """Less what it takes to decompress the hit; an absorbed prefill has over three times the FLOPs a pair."""
    model, prompt, cached = DEEPSEEK_V3, 8192, 4096
    cold, warm = StepSize.prefill(prompt, rows=0), StepSize.prefill(prompt - cached, cached, rows=0)
    area = area_saved(0.5, model.kappa_per_token * prompt)
    decompressed, absorbed = (
        1 - totals(model.step(warm, absorbed=how))[0] / totals(model.step(cold, absorbed=how))[0]
        for how in (False, True)
    )
    again = 2 * 61 * 512 * 128 * (128 + 128) * cached
    assert decompressed + again / totals(model.step(cold, absorbed=False))[0] == pytest.approx(area, abs=1e-4)
    assert absorbed < area - 0.05


def test_without_latent_attention_there_is_nothing_to_absorb() -> None:
    size = StepSize.prefill(100, 50)
    assert LLAMA_3_1_8B.step(size) == LLAMA_3_1_8B.step(size, absorbed=False)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_ratio_outside_its_range_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        area_saved(ratio, 0.1)


def test_ttft_shrinks_only_where_prefill_computes() -> None:
    parts = FirstToken(prefill=1.0, fixed=0.2, queue=0.3, tokenize=0.01, network=0.02)
    assert parts.at(0.0) == pytest.approx(0.3 + 0.01 + 1.0 + 0.02)
    assert parts.at(0.5) == pytest.approx(parts.at(0.0) - 0.5 * 0.8)
    assert parts.at(1.0) == pytest.approx(0.3 + 0.01 + 0.2 + 0.02), "what no hit shortens stays"
    assert parts.at(0.5, load=0.6) > parts.at(0.0), "loading may cost more than it saves"


def test_the_keys_of_a_hit_are_read_by_every_later_token() -> None:
    """So a hit makes no decode step cheaper: there is nothing to credit TPOT with."""
    far, near = (totals(LLAMA_3_1_8B.step(StepSize.decode([context])))[1] for context in (1001, 1))
    assert far - near == 1000 * LLAMA_3_1_8B.kv_bytes_per_token()
    assert LLAMA_3_1_8B.step(StepSize.prefill(1, 1000)) == LLAMA_3_1_8B.step(StepSize.decode([1001]))


def test_capacity_grows_with_prefills_share_of_the_time() -> None:
    assert capacity_gain(0.5, 0.6) == pytest.approx(1 / 0.7)
    assert capacity_gain(0.0, 0.9) == 1.0, "a device that only decodes gains nothing"
    with pytest.raises(ValueError, match=r"prefill 1\.5"):
        capacity_gain(1.5, 0.5)


def test_the_gain_stays_below_amdahls_bound_and_reaches_it() -> None:
    assert all(capacity_gain(0.6, saved) < amdahl_bound(0.6) for saved in (0.0, 0.5, 0.99))
    assert capacity_gain(0.6, 1.0) == pytest.approx(amdahl_bound(0.6)) == pytest.approx(2.5)
    assert capacity_gain(1.0, 1.0) == amdahl_bound(1.0) == float("inf")


@pytest.mark.parametrize(("flops", "gigabytes"), [(8 * 312e12, 6), (8 * 989e12, 19)])
def test_mooncakes_thresholds_for_llama3_70b(flops: float, gigabytes: int) -> None:
    """Qin et al. 2024, section 3: 8xA800 and 8xH800 at a prefix of 8,192."""
    assert worth_loading(8192, 8192, 2, 8, flops) / 1e9 == pytest.approx(gigabytes, abs=0.5)


@pytest.mark.parametrize(("name", "tokens", "area"), [("conversation", 37.36, 32.15), ("synthetic", 65.12, 70.05)])
def test_a_whole_trace_saves_what_was_published_of_it(name: str, tokens: float, area: float) -> None:
    path = TRACES / f"{name}_trace.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the trace {path.name} is not here")
    seen: set[int] = set()
    hits = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            matched = next((i for i, block in enumerate(row["hash_ids"]) if block not in seen), len(row["hash_ids"]))
            seen.update(row["hash_ids"])
            hits.append((min(512 * matched, row["input_length"]), row["input_length"]))
    saving = trace_saving(hits)
    assert round(100 * saving.linear, 2) == tokens
    assert round(100 * saving.attention, 2) == area


def test_a_trace_without_prompts_saves_nothing() -> None:
    with pytest.raises(ValueError, match="without prompt tokens"):
        trace_saving([])
