"""The parity table: whatever the engine does to a request, its tokens are those it has alone.

One workload of mixed lengths and sampling parameters, on a tiny random model, each request first alone on a cold
engine; then batched, cut into chunks, with a warm cache, preempted, swapped, offloaded, overlapped, forked. The
log-probabilities, which no sampling hides behind, must agree too. Each row of the table also shows that what it is
named for really happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dataplane.config import EngineConfig
from dataplane.engine import EngineCore
from dataplane.protocol import EngineRequest, FinishReason, MemoryCounters, SamplingParams, TokenLogprob
from tests.factories.models import tiny_config, write_safetensors

COUNT = 24
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 90)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11, "stop_token_ids": tuple(range(90, 100))},
    {"temperature": 1.5, "seed": 12, "top_p": 0.9, "logit_bias": {40: 3.0, 41: -100.0}},
    {"temperature": 0.7, "seed": 13, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 14, "bad_words": tuple((token,) for token in range(60, 90)), "min_p": 0.02},
    {"temperature": 2.0, "seed": 15, "stop_token_ids": tuple(range(96, 112)), "min_tokens": 3},
)


@dataclass
class Made:
    """All that one request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: FinishReason | None = None
    cached: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("tiny"), tiny_config())


def wire(request_id: str, prompt: list[int], **fields: Any) -> EngineRequest:
    forks = fields.pop("forks", ())
    params = SamplingParams(**{"max_tokens": COUNT, "ignore_eos": True, "logprobs": 3, **fields})
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, arrived_at=0.0, forks=forks)


def workload() -> list[EngineRequest]:
    """Prompts of every length around block edges; four share a beginning of 40 tokens."""
    generator = torch.Generator().manual_seed(7)

    def tokens(count: int) -> list[int]:
        made: list[int] = torch.randint(3, 128, (count,), generator=generator).tolist()
        return made

    shared = tokens(40)
    prompts = [*(tokens(length) for length in LENGTHS), *([*shared, *tokens(extra)] for extra in (1, 5, 9, 30))]
    return [
        wire(str(index), prompt, **SAMPLING[index % len(SAMPLING)], prompt_logprobs=2 if index % 4 == 1 else None)
        for index, prompt in enumerate(prompts)
    ]


def build(folder: Path, **options: Any) -> EngineCore:
    return EngineCore(EngineConfig.resolve(folder, **{"num_blocks": 200, "threads": 1, **options}))


def serve(core: EngineCore, requests: Iterable[EngineRequest]) -> dict[str, Made]:
    """Run all at once to the end; the core is left empty and sound."""
    made: dict[str, Made] = {}
    for request in requests:
        core.add(request)
    while core.has_work():
        for output in core.step():
            into = made.setdefault(output.request_id, Made())
            assert into.finish is None, "an output came after the last one"
            assert output.error is None
            assert len(output.logprobs) == len(output.token_ids)
            into.tokens += output.token_ids
            into.logprobs += output.logprobs
            into.finish, into.cached = output.finish, output.cached_tokens
            if output.prompt_logprobs is not None:
                assert into.prompt_logprobs is None
                into.prompt_logprobs = output.prompt_logprobs
        core.check_integrity()
    gauges = core.stats().gauges
    assert (gauges.blocks_used, gauges.blocks_free) == (0, gauges.blocks_total)
    return made


def close(ours: list[TokenLogprob | None], theirs: list[TokenLogprob | None]) -> None:
    """The same tokens, with the same log-probabilities."""
    assert len(ours) == len(theirs)
    for one, two in zip(ours, theirs, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert (one.token_id, one.rank, len(one.top)) == (two.token_id, two.rank, len(two.top))
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
            assert [value for _, value in one.top] == pytest.approx([value for _, value in two.top], abs=1e-4)


def same(made: dict[str, Made], expected: dict[str, Made]) -> None:
    assert set(made) == set(expected)
    for request_id, one in made.items():
        two = expected[request_id]
        assert one.tokens == two.tokens, f"request {request_id}"
        assert one.finish is two.finish
        close([*one.logprobs], [*two.logprobs])
        assert (one.prompt_logprobs is None) == (two.prompt_logprobs is None)
        close(one.prompt_logprobs or [], two.prompt_logprobs or [])


@pytest.fixture(scope="module")
def cold(folder: Path) -> EngineCore:
    """Where requests run alone: nothing is cached, every step is waited for, prompts are computed whole."""
    return build(folder, prefix_caching=False)


@pytest.fixture(scope="module")
def alone(cold: EngineCore) -> dict[str, Made]:
    """Each request by itself, nothing cached, one step at a time."""
    made: dict[str, Made] = {}
    for request in workload():
        made |= serve(cold, [request])
    lengths = {len(one.tokens) for one in made.values()}
    assert len(lengths) > 2, "some requests must end early"
    assert {one.finish for one in made.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    return made


def memory(core: EngineCore) -> MemoryCounters:
    return core.stats().counters.memory


def preemptions(core: EngineCore) -> dict[str, int]:
    return core.stats().counters.scheduling.preemptions


def test_the_workload_is_what_transformers_scores(folder: Path, alone: dict[str, Made]) -> None:
    """Every log-probability of the undisturbed run, of prompts and outputs, is transformers' log softmax."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for request in workload():
        made, prompt = alone[request.request_id], request.prompt_token_ids
        sequence = [*prompt, *made.tokens]
        with torch.inference_mode():
            expected = torch.log_softmax(theirs(torch.tensor([sequence])).logits[0], dim=-1)
        scored = [*(made.prompt_logprobs or [None] * len(prompt)), *made.logprobs]
        for position, one in enumerate(scored):
            if one is not None:
                row = expected[position - 1]
                assert one.token_id == sequence[position]
                assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
                assert one.rank == int((row > row[one.token_id]).sum()) + 1
                assert [value for _, value in one.top] == pytest.approx(
                    row.topk(len(one.top)).values.tolist(), abs=1e-4
                )
        if request.params.temperature == 0.0:
            assert {one.rank for one in made.logprobs} == {1}
    assert sum(made.prompt_logprobs is not None for made in alone.values()) >= 3


@pytest.mark.parametrize("batching", ["continuous", "static", "selective"])
def test_batched_is_alone(folder: Path, alone: dict[str, Made], batching: str) -> None:
    core = build(folder, prefix_caching=False, batching=batching, batch_size=5 if batching == "static" else 0)
    same(serve(core, workload()), alone)
    steps = core.stats().counters.scheduling.steps
    assert steps < sum(len(made.tokens) for made in alone.values()) / 3


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 90])
def test_chunked_is_whole(folder: Path, alone: dict[str, Made], chunk: int) -> None:
    core = build(folder, prefix_caching=False, long_prefill_threshold=chunk)
    same(serve(core, workload()), alone)
    budget = build(folder, prefix_caching=False, max_num_batched_tokens=max(chunk, 2))
    same(serve(budget, workload()), alone)


def test_cached_is_cold(folder: Path, alone: dict[str, Made]) -> None:
    core = build(folder)
    same(serve(core, workload()), alone)
    assert memory(core).prefix_hits > 0, "the shared beginning is found inside one batch"
    before = memory(core).prefix_hits
    again = serve(core, workload())
    same(again, alone)
    found = {request.request_id: (len(request.prompt_token_ids) - 1) // 16 * 16 for request in workload()}
    for request in workload():
        scored = request.params.prompt_logprobs is not None
        assert again[request.request_id].cached == (0 if scored else found[request.request_id])
    assert memory(core).prefix_hits - before == sum(made.cached for made in again.values()) > 200


def test_scored_prompts_are_computed_and_cached_for_others(folder: Path) -> None:
    core, prompt = build(folder), workload()[9].prompt_token_ids
    for _ in range(2):
        (scored,) = serve(core, [wire("a", prompt, temperature=0.0, prompt_logprobs=0)]).values()
        assert scored.cached == 0
        assert len(scored.prompt_logprobs or []) == len(prompt)
    (reader,) = serve(core, [wire("b", prompt, temperature=0.0)]).values()
    assert reader.cached == 80
    assert reader.tokens == scored.tokens


TIGHT = {"num_blocks": 13, "max_model_len": 128, "watermark": 0.0}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("flights", [1, 2])
@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_swapped_is_recomputed_is_undisturbed(
    folder: Path, alone: dict[str, Made], way: str, flights: int, caching: bool
) -> None:
    host = 64 if way == "swap" else 0
    core = build(folder, **TIGHT, preemption=way, host_blocks=host, steps_in_flight=flights, prefix_caching=caching)
    same(serve(core, workload()), alone)
    assert preemptions(core)[way] > 0
    counters = memory(core)
    if way == "swap":
        assert counters.swapped_in > 0
        # What the device's cache still has of a request need not come back.
        assert counters.swapped_in < counters.swapped_out if caching else counters.swapped_in == counters.swapped_out
        assert core.stats().gauges.host_blocks_total == 64


def test_a_prefill_that_is_preempted_is_scored_whole(folder: Path, alone: dict[str, Made]) -> None:
    """Small chunks and a small pool: prompts lose their blocks half way, and every position is scored once."""
    for way, host in (("recompute", 0), ("swap", 64)):
        core = build(folder, **TIGHT, preemption=way, host_blocks=host, max_num_batched_tokens=8)
        same(serve(core, workload()), alone)
        assert preemptions(core)[way] > 0


def test_offloaded_is_cold(folder: Path, alone: dict[str, Made]) -> None:
    """Prefixes that were evicted to host memory come back and are read."""
    core = build(folder, num_blocks=17, max_model_len=128, host_blocks=128)
    same(serve(core, workload()), alone)
    same(serve(core, workload()), alone)
    assert memory(core).offloaded > 0
    assert memory(core).host_hits > 0


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 16}, {"capacity": "reserve_max"}, {"max_num_seqs": 3}]
)
def test_overlapped_is_synchronous(folder: Path, alone: dict[str, Made], options: dict[str, Any]) -> None:
    core = build(folder, steps_in_flight=2, **options)
    same(serve(core, workload()), alone)
    stopped = sum(made.finish is FinishReason.STOP for made in alone.values())
    assert 0 < core.stats().counters.scheduling.wasted_tokens <= stopped


@pytest.mark.parametrize("length", [1, 16, 17, 40])
@pytest.mark.parametrize(
    "options", [{}, {"steps_in_flight": 2}, {"max_num_batched_tokens": 7}, {"prefix_caching": False}]
)
def test_forked_is_separate_with_those_seeds(
    folder: Path, cold: EngineCore, length: int, options: dict[str, Any]
) -> None:
    prompt, count = (workload()[9].prompt_token_ids)[:length], 4
    sampling = {"temperature": 1.5, "prompt_logprobs": None}
    expected: dict[str, Made] = {}
    for index in range(count):
        name = "p" if index == 0 else f"f{index}"
        expected |= serve(cold, [wire(name, prompt, seed=30 + index, **sampling)])
    assert len({tuple(made.tokens) for made in expected.values()}) == count

    core = build(folder, **options)
    parent = wire("p", prompt, seed=30, forks=tuple(f"f{index}" for index in range(1, count)), **sampling)
    beside = [wire(f"x{index}", prompt[::-1], seed=index, temperature=1.0) for index in range(2)]
    made = serve(core, [beside[0], parent, beside[1]])
    same({name: made[name] for name in expected}, expected)
    assert memory(core).copied == (count - 1 if length % 16 else 0)


def test_forks_survive_preemption(folder: Path, cold: EngineCore) -> None:
    """Samples that share blocks lose and regain them, in both ways, one and two steps in flight."""
    prompt, names = workload()[8].prompt_token_ids[:37], ["p", *(f"f{index}" for index in range(1, 4))]
    sampling = {"temperature": 1.5, "max_tokens": 60}
    expected: dict[str, Made] = {}
    for index, name in enumerate(names):
        expected |= serve(cold, [wire(name, prompt, seed=30 + index, **sampling)])
    for way in ("recompute", "swap"):
        for flights in (1, 2):
            core = build(folder, **TIGHT, preemption=way, host_blocks=64, steps_in_flight=flights)
            made = serve(core, [wire("p", prompt, seed=30, forks=tuple(names[1:]), **sampling)])
            same(made, expected)
            assert sum(preemptions(core).values()) > 0


def test_all_of_it_at_once(folder: Path, cold: EngineCore, alone: dict[str, Made]) -> None:
    """Small chunks, two steps in flight, a tight pool with swap and offload, a warm cache, forks beside."""
    core = build(folder, **TIGHT, preemption="swap", host_blocks=40, steps_in_flight=2, max_num_batched_tokens=24)
    forked = wire("p", workload()[4].prompt_token_ids, seed=1, temperature=1.2, forks=("f1", "f2"))
    for _ in range(3):
        made = serve(core, [*workload()[:7], forked, *workload()[7:]])
        samples = {name: made.pop(name) for name in ("p", "f1", "f2")}
        same(made, alone)
        for index, name in enumerate(samples):
            (apart,) = serve(cold, [wire("a", forked.prompt_token_ids, seed=1 + index, temperature=1.2)]).values()
            assert samples[name].tokens == apart.tokens
    assert preemptions(core)["swap"] > 0
    assert memory(core).host_hits > 0


def test_a_forced_difference_is_seen(folder: Path, alone: dict[str, Made]) -> None:
    """Negative control: another seed, or one other prompt token, and the comparison fails."""
    first, seeded = workload()[9], workload()[1]
    for other in (
        wire("9", [*first.prompt_token_ids[:-30], 5, *first.prompt_token_ids[-29:]], **SAMPLING[3], prompt_logprobs=2),
        wire("1", seeded.prompt_token_ids, **{**SAMPLING[1], "seed": 99}, prompt_logprobs=2),
    ):
        with pytest.raises(AssertionError):
            same(serve(build(folder), [other]), {other.request_id: alone[other.request_id]})
