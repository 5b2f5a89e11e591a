"""The engine core as its callers see it: arrivals, steps, exits, and truthful numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from dataplane.config import EngineConfig
from dataplane.engine import EngineCore
from dataplane.errors import IntegrityError
from dataplane.protocol import BlockStored, EngineRequest, FinishReason, RequestOutput, SamplingParams
from dataplane.request import RequestError
from dataplane.scheduling.plan import Plan, StepResult
from tests.factories.families import config_of, random_model
from tests.factories.models import tiny_config, write_safetensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("tiny"), tiny_config())


def make(folder: Path, clock: Callable[[], float] | None = None, **options: Any) -> EngineCore:
    config = EngineConfig.resolve(folder, **{"num_blocks": 65, "threads": 1, **options})
    return EngineCore(config, clock=clock) if clock else EngineCore(config)


def wire(request_id: str, prompt: list[int], tenant: str = "acme", **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}),
        arrived_at=0.0,
        tenant=tenant,
    )


def drain(core: EngineCore) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while core.has_work():
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.check_integrity()
    return outputs


def test_ready_says_what_was_built(folder: Path) -> None:
    core = make(folder, boot_epoch=7, forward="eager")
    assert core.ready.boot_epoch == 7
    assert (core.ready.total_blocks, core.ready.block_size, core.ready.max_model_len) == (64, 16, 512)
    assert core.ready.eos_token_ids == [2]
    assert core.ready.weight_bytes == sum(
        tensor.nbytes
        for name, tensor in core._runner.forward.model.weights().items()  # type: ignore[attr-defined]  # it is eager
        if name != "lm_head.weight"
    )
    assert core.ready.kv_bytes == 65 * 16 * core.config.model.shape.kv_bytes_per_token
    assert (core.ready.attention_backend, core.ready.forward, core.ready.weights) == ("torch", "eager", "float32")
    captured = make(folder, forward="captured").ready
    assert (captured.attention_backend, captured.forward, captured.weights) == ("cpu", "captured", "float32")
    assert captured.kernel_tier
    assert core.ready.weight_bytes <= captured.weight_bytes < 1.2 * core.ready.weight_bytes


def test_outputs_come_token_by_token_and_finish_once(folder: Path) -> None:
    core = make(folder)
    assert core.step() == []
    core.add(wire("a", [5, 6, 7]))
    outputs = drain(core)["a"]
    assert [len(output.token_ids) for output in outputs] == [1] * 8
    assert [output.finish for output in outputs] == [*[None] * 7, FinishReason.LENGTH]
    assert core.step() == []


def test_timing_is_on_the_cores_clock_and_in_order(folder: Path) -> None:
    ticks = itertools.count(100)
    core = make(folder, clock=lambda: float(next(ticks)))
    core.add(wire("a", [5, 6, 7]))
    last = drain(core)["a"][-1]
    assert last.timing is not None
    assert last.timing.scheduled is not None
    assert last.timing.first_token is not None
    assert last.timing.last_token is not None
    assert 100 <= last.timing.queued < last.timing.scheduled < last.timing.first_token < last.timing.last_token
    assert last.kv_block_seconds > 0
    assert last.device_seconds > 0


def test_a_stop_id_ends_with_its_reason(folder: Path) -> None:
    core = make(folder)
    core.add(wire("free", [5, 6, 7]))
    tokens = [token for output in drain(core)["free"] for token in output.token_ids]
    stop = tokens[3]
    core.add(wire("held", [5, 6, 7], stop_token_ids=(stop,)))
    outputs = drain(core)["held"]
    assert outputs[-1].finish is FinishReason.STOP
    assert outputs[-1].stop_reason == stop
    assert [token for output in outputs for token in output.token_ids] == tokens[: tokens.index(stop) + 1]
    core.add(wire("later", [5, 6, 7], stop_token_ids=(stop,), min_tokens=6))
    later = [token for output in drain(core)["later"] for token in output.token_ids]
    assert len(later) >= 6
    assert stop not in later[:5]


def test_abort_frees_every_block_at_once_and_others_go_on(folder: Path) -> None:
    core = make(folder)
    core.add(wire("gone", list(range(3, 40))))
    core.add(wire("here", [5, 6, 7]))
    core.step()
    used = core.stats().gauges.blocks_used
    (output,) = core.abort(["gone", "unknown"])
    assert output.finish is FinishReason.ABORT
    assert core.stats().gauges.blocks_used == used - 3
    assert drain(core)["here"][-1].finish is FinishReason.LENGTH
    assert core.abort(["here"]) == []


def test_an_aborted_id_may_come_again(folder: Path) -> None:
    core = make(folder)
    core.add(wire("a", [5, 6, 7]))
    core.step()
    core.abort(["a"])
    core.add(wire("a", [5, 6, 7]))
    assert drain(core)["a"][-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (wire("a", []), "invalid_value"),
        (wire("a", [5] * 512), "context_length_exceeded"),
        (wire("a", [5] * 508), "context_length_exceeded"),
        (wire("a", [5, 128]), "invalid_value"),
        (wire("a", [-1]), "invalid_value"),
        (wire("a", [5], temperature=9.0), "invalid_value"),
        (
            EngineRequest(request_id="a", prompt_token_ids=[5], params=SamplingParams(), arrived_at=0, adapter="x"),
            "model_not_found",
        ),
        (
            EngineRequest(
                request_id="a", prompt_token_ids=[5], params=SamplingParams(), arrived_at=0, fair_tag=float("nan")
            ),
            "invalid_value",
        ),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_nothing(folder: Path, request_: EngineRequest, code: str) -> None:
    core = make(folder)
    with pytest.raises(RequestError) as refused:
        core.add(request_)
    assert refused.value.code == code
    assert not core.has_work()
    core.check_integrity()


def test_a_prompt_at_the_edge_of_the_context_runs(folder: Path) -> None:
    core = make(folder)
    core.add(wire("full", [5] * 504))
    core.add(wire("last", [6] * 511, max_tokens=None))
    core.add(wire("one", [9], max_tokens=511))
    outputs = drain(core)
    assert [len(outputs[name]) for name in ("full", "last", "one")] == [8, 1, 511]


def test_the_second_request_finds_the_first_ones_blocks_and_says_so(folder: Path) -> None:
    core = make(folder)
    prompt = list(range(3, 53))
    core.add(wire("cold", prompt))
    assert drain(core)["cold"][-1].cached_tokens == 0
    core.add(wire("warm", prompt))
    core.add(wire("foreign", prompt, tenant="beta"))
    outputs = drain(core)
    assert outputs["warm"][-1].cached_tokens == 48
    assert outputs["foreign"][-1].cached_tokens == 0
    counters = core.stats().counters
    assert (counters.memory.prefix_queries, counters.memory.prefix_hits) == (150, 48)
    assert core.stats().gauges.recent_hit_ratio == pytest.approx(48 / 150)
    acme = counters.scheduling.tenants["acme"]
    assert (acme.prompt_tokens, acme.cached_tokens, acme.output_tokens, acme.finished) == (100, 48, 16, 2)
    assert core.reset_prefix_cache()
    core.add(wire("after", prompt))
    assert not core.reset_prefix_cache() or not core.stats().gauges.blocks_used
    assert drain(core)["after"][-1].cached_tokens == 0


def test_counters_are_exact(folder: Path) -> None:
    core = make(folder, max_num_batched_tokens=16)
    core.add(wire("a", list(range(3, 43))))
    drain(core)
    counters = core.stats().counters
    assert counters.scheduling.steps == 10
    assert counters.scheduling.token_budget == 160
    assert counters.scheduling.tokens_scheduled == 40 + 7
    assert counters.scheduling.prompt_tokens == 40
    assert counters.scheduling.output_tokens == 8
    assert counters.runtime.step_time is not None
    assert counters.runtime.step_time.count == 10
    shape = core.config.model.shape
    pairs = sum(range(1, 48))
    assert counters.runtime.flops == pytest.approx(shape.step_flops(47, pairs, 8))
    parts = counters.runtime
    inside = parts.schedule_s + parts.prepare_s + parts.forward_s + parts.sample_s + parts.post_s
    assert 0 < inside <= parts.step_time.total * 1.01  # type: ignore[union-attr]  # checked above


def test_gauges_show_the_pool_as_it_is(folder: Path) -> None:
    core = make(folder)
    core.add(wire("a", list(range(3, 23))))
    core.add(wire("b", [5, 6, 7]))
    assert (core.stats().gauges.running, core.stats().gauges.waiting) == (0, 2)
    core.step()
    gauges = core.stats().gauges
    assert (gauges.running, gauges.waiting) == (2, 0)
    assert (gauges.blocks_total, gauges.blocks_used, gauges.blocks_free, gauges.blocks_cached) == (64, 3, 61, 1)
    assert gauges.kv_slots_empty == 3 * 16 - 23
    (rank,) = gauges.ranks
    assert rank.weights == core.ready.weight_bytes
    assert rank.kv == core.ready.kv_bytes
    assert 0 < rank.free <= rank.total


def test_stats_are_copies(folder: Path) -> None:
    core = make(folder)
    core.add(wire("a", [5, 6, 7]))
    core.step()
    before = core.stats()
    drain(core)
    after = core.stats()
    assert before.counters.scheduling.output_tokens == 1
    assert after.counters.since(before.counters).scheduling.output_tokens == 7


def test_evictions_and_preemptions_are_counted(folder: Path) -> None:
    core = make(folder, num_blocks=9, max_model_len=128, watermark=0.0)
    for index in range(4):
        core.add(wire(str(index), [3 + index] * 30, max_tokens=40))
    drain(core)
    counters = core.stats().counters
    assert counters.memory.evictions > 0
    assert counters.scheduling.preemptions["recompute"] > 0
    assert core.stats().gauges.blocks_used == 0


def test_kv_events_are_given_out_when_asked_for(folder: Path) -> None:
    quiet, loud = make(folder), make(folder, kv_events=True)
    for core in (quiet, loud):
        core.add(wire("a", list(range(3, 43))))
        drain(core)
    assert quiet.take_kv_events() is None
    batch = loud.take_kv_events()
    assert batch is not None
    (stored,) = batch.events
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == list(range(3, 35))
    assert loud.take_kv_events() is None


def test_a_sampled_request_does_not_depend_on_its_batch_and_survives_preemption(folder: Path) -> None:
    sampled = wire(
        "s", [7] * 20, temperature=1.0, seed=42, max_tokens=30, repetition_penalty=1.2, frequency_penalty=0.3
    )
    alone = make(folder)
    alone.add(sampled)
    expected = [output.token_ids for output in drain(alone)["s"]]
    crowded = make(folder, num_blocks=9, max_model_len=128, watermark=0.0)
    for index in range(3):
        crowded.add(wire(str(index), [20 + index] * 20, temperature=0.7, max_tokens=40))
    crowded.add(sampled)
    outputs = drain(crowded)["s"]
    assert outputs[-1].preemptions > 0
    assert [output.token_ids for output in outputs] == expected


def test_requests_without_a_seed_differ(folder: Path) -> None:
    core = make(folder)
    for index in range(4):
        core.add(wire(str(index), [7] * 20, temperature=1.5, max_tokens=20))
    made = {tuple(token for output in found for token in output.token_ids) for found in drain(core).values()}
    assert len(made) == 4


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma multiplies an embedding by √hidden: that of token 99 is a number that this makes infinite."""
    folder = tmp_path_factory.mktemp("overflowing")
    model = random_model(config_of("gemma", tie_word_embeddings=False))
    with torch.no_grad():
        model.get_input_embeddings().weight[99] = 3e38
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [{"forward": "eager"}, {"forward": "captured"}], ids=["eager", "captured"])
def test_a_logit_that_is_no_number_ends_that_request_alone(overflowing: Path, options: dict[str, str]) -> None:
    """NaN enters with one embedding row: only the request that uses the token is harmed, and its KV is forgotten."""
    core = make(overflowing, num_blocks=5, max_model_len=64, **options)
    core.add(wire("bad", [99] * 20))
    core.add(wire("good", [5] * 20))
    outputs = drain(core)
    assert outputs["bad"][-1].finish is FinishReason.ERROR
    assert outputs["bad"][-1].error is not None
    assert "not a number" in outputs["bad"][-1].error
    assert outputs["good"][-1].finish is FinishReason.LENGTH
    # The pool is so small that others must take the blocks that held NaN, and read beside it.
    for index in range(4):
        core.add(wire(f"reuse-{index}", list(range(3 + index, 23 + index)), max_tokens=3))
    assert {found[-1].finish for found in drain(core).values()} == {FinishReason.LENGTH}
    assert core.stats().gauges.blocks_used == 0


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
def test_a_number_that_is_none_is_not_rounded_away(folder: Path, weights: str) -> None:
    """What is no number stays that when activations are made integers: here it comes from a request's own keys."""
    core = make(folder, weights=weights)
    core.add(wire("bad", list(range(3, 15))))
    core.step()
    for keys in core._runner.store.keys:
        keys[:, keys.abs().amax((0, 2)) > 0] = torch.nan
    core.add(wire("good", [5] * 20))
    outputs = drain(core)
    assert outputs["bad"][-1].finish is FinishReason.ERROR
    assert outputs["good"][-1].finish is FinishReason.LENGTH


def test_a_core_whose_step_failed_does_not_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make(folder)
    core.add(wire("a", [5, 6, 7]))

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(core._runner, "submit", fail)
    with pytest.raises(RuntimeError):
        core.step()
    monkeypatch.undo()
    with pytest.raises(IntegrityError, match="cannot go on"):
        core.step()


def mixed_load(core: EngineCore) -> dict[str, list[int]]:
    """Greedy and sampled requests, forks, stop ids and a long prompt, some of which end early; their tokens."""
    core.add(wire("greedy", [5, 6, 7], max_tokens=30))
    core.add(wire("sampled", [9] * 20, temperature=1.0, seed=42, max_tokens=25, frequency_penalty=0.3))
    core.add(wire("stopped", [5, 6, 7], max_tokens=30, ignore_eos=False, stop_token_ids=tuple(range(0, 128, 9))))
    core.add(wire("long", [3 + index % 100 for index in range(120)]))
    core.add(msgspec.structs.replace(wire("forked", [11] * 21, temperature=1.0, seed=7), forks=("fork-1", "fork-2")))
    outputs = drain(core)
    assert core.stats().gauges.blocks_used == 0
    return {name: [token for output in found for token in output.token_ids] for name, found in outputs.items()}


def test_two_steps_in_flight_yield_the_same_tokens(folder: Path) -> None:
    options = {"max_num_batched_tokens": 32, "max_model_len": 256}
    core = make(folder, steps_in_flight=2, **options)
    overlapped = mixed_load(core)
    assert overlapped == mixed_load(make(folder, **options))
    assert len(overlapped) == 7
    # One step too many for the request that a stop id ended, and for nobody else: a limit is seen coming.
    assert core.stats().counters.scheduling.wasted_tokens == 1
    core.close()


def test_the_next_step_is_submitted_before_the_first_result_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(folder, steps_in_flight=2)
    log: list[str] = []
    submit = core._executor.submit

    class Logged:
        def __init__(self, plan: Plan) -> None:
            log.append(f"submit {plan.step}")
            self.step, self.handle = plan.step, submit(plan)

        def result(self) -> StepResult:
            log.append(f"take {self.step}")
            return self.handle.result()

    monkeypatch.setattr(core._executor, "submit", Logged)
    core.add(wire("a", [5, 6, 7], max_tokens=3))
    drain(core)
    assert log == ["submit 1", "submit 2", "take 1", "submit 3", "take 2", "take 3"]
    core.close()


def test_an_abort_in_flight_gives_the_blocks_back_when_the_step_is_done(folder: Path) -> None:
    core = make(folder, steps_in_flight=2)
    core.add(wire("gone", list(range(3, 40)), max_tokens=50))
    core.step()
    (output,) = core.abort(["gone"])
    assert output.finish is FinishReason.ABORT
    assert core.stats().gauges.blocks_used == 3
    core.add(wire("next", list(range(3, 40))))
    assert drain(core)["next"][-1].finish is FinishReason.LENGTH
    assert core.stats().gauges.blocks_used == 0
    core.close()


def test_a_core_whose_step_failed_in_its_thread_does_not_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make(folder, steps_in_flight=2)
    core.add(wire("a", [5, 6, 7]))

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(core._runner, "submit", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        core.step()
    with pytest.raises(IntegrityError, match="cannot go on"):
        core.step()
    core.close()


def test_a_window_that_is_open_says_how_long_to_sleep(folder: Path) -> None:
    now = 100.0
    core = make(folder, clock=lambda: now, batching="dynamic", batch_size=2, batch_window_s=0.5)
    assert core.pause_s == 0.0
    core.add(wire("a", [5, 6, 7], max_tokens=1))
    assert core.step() == []
    assert core.pause_s == pytest.approx(0.5)
    now = 100.2
    assert core.pause_s == pytest.approx(0.3)
    now = 100.5
    assert core.pause_s == 0.0
    assert [output.request_id for output in core.step()] == ["a"]


def test_a_request_whose_deadline_passed_while_it_waited_ends_with_an_error(folder: Path) -> None:
    now = 100.0
    core = make(folder, clock=lambda: now, max_num_seqs=1)
    core.add(wire("first", [5, 6, 7]))
    core.add(msgspec.structs.replace(wire("late", [5, 6, 7]), arrived_at=7.0, deadline_at=9.0))
    core.step()
    now = 102.5
    (late, first) = core.step()
    assert (late.request_id, late.finish, late.token_ids) == ("late", FinishReason.ERROR, [])
    assert late.error is not None
    assert late.error.startswith("deadline_exceeded")
    assert (first.request_id, first.finish) == ("first", None)


def test_nobody_pauses_when_the_step_in_flight_has_made_room(folder: Path) -> None:
    """No plan can seat "next" before the result of the last step is in; after it, at once."""
    core = make(folder, clock=lambda: 100.0, max_num_seqs=1, steps_in_flight=2)
    core.add(wire("first", [5, 6, 7], max_tokens=1))
    core.add(msgspec.structs.replace(wire("next", [5, 6, 7]), arrived_at=0.0, deadline_at=9.0))
    assert [output.request_id for output in core.step()] == ["first"]
    assert core.pause_s == 0.0
    assert drain(core)["next"][-1].finish is FinishReason.LENGTH
    core.close()


def test_more_samples_than_may_run_at_once_are_refused(folder: Path) -> None:
    core = make(folder, max_num_seqs=2)
    assert not core.ready.reserves_max
    with pytest.raises(RequestError) as refused:
        core.validate(msgspec.structs.replace(wire("a", [5]), forks=("b", "c")))
    assert refused.value.param == "n"
    with pytest.raises(RequestError) as refused:
        core.validate(msgspec.structs.replace(wire("a", [5]), deadline_at=float("nan")))
    assert refused.value.param == "deadline_at"


def test_samples_that_the_pool_can_never_hold_are_refused_before_they_are_queued(folder: Path) -> None:
    core = make(folder, num_blocks=33, capacity="reserve_max")
    assert core.ready.reserves_max
    forks = ("b", "c", "d")
    core.validate(msgspec.structs.replace(wire("a", [5], max_tokens=120), forks=forks))
    with pytest.raises(RequestError) as refused:
        core.validate(msgspec.structs.replace(wire("a", [5], max_tokens=150), forks=forks))
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
