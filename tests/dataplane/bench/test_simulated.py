"""The simulated machine: its time is the profile's, and the run over it is the scheduler's own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dataplane.bench.simulated import SimulatedExecutor, simulate
from dataplane.bench.stepcost import OPT_13B_A100, StepCost, StepWork
from dataplane.bench.traces import TraceError, TraceRow
from dataplane.bench.workload import percentile, poisson, prompt_of, request_of, requests_of, requests_of_trace
from dataplane.errors import IntegrityError
from dataplane.memory.manager import KVManager
from dataplane.protocol import RequestOutput
from dataplane.request import RequestError
from dataplane.scheduling.config import SchedulerConfig
from dataplane.scheduling.plan import NewRequest, Plan, RunningRequest
from dataplane.scheduling.scheduler import Scheduler
from tests.dataplane.bench.conftest import PUBLIC

A, B, C = OPT_13B_A100.prefill
A_DECODE, B_DECODE, C_DECODE = OPT_13B_A100.decode_small


def plan_of(*chunks: tuple[int, int]) -> Plan:
    """A step of (computed, count) requests that run already."""
    return Plan(
        step=1,
        tokens={str(number): count for number, (_, count) in enumerate(chunks)},
        samples=frozenset(),
        running=tuple(RunningRequest(str(number), [], computed) for number, (computed, _) in enumerate(chunks)),
        context=sum(computed + count for computed, count in chunks),
    )


def test_prefill_and_decode_cost_what_the_profile_says() -> None:
    whole = StepWork.of(plan_of((0, 700), (0, 300)))
    assert OPT_13B_A100.seconds(whole) == pytest.approx((A + B * 1000 + C * (700**2 + 300**2)) / 1000)
    decode = StepWork.of(plan_of((99, 1), (499, 1)))
    assert OPT_13B_A100.seconds(decode) == pytest.approx((A_DECODE + B_DECODE * 600 + C_DECODE * 2) / 1000)


def test_a_large_batch_has_its_own_coefficients() -> None:
    fixed, context, each = OPT_13B_A100.decode_large
    work = StepWork.of(plan_of(*[(9, 1)] * 96))
    assert OPT_13B_A100.seconds(work) == pytest.approx((fixed + context * 960 + each * 96) / 1000)


def test_chunks_do_the_work_of_the_whole_and_pay_for_their_steps() -> None:
    chunks = [StepWork.of(plan_of((start, 250))) for start in range(0, 1000, 250)]
    whole = StepWork.of(plan_of((0, 1000)))
    assert sum(work.squares for work in chunks) == whole.squares
    spent = sum(OPT_13B_A100.prefill_ms(work) for work in chunks)
    assert spent == pytest.approx(OPT_13B_A100.prefill_ms(whole) + 3 * A)


def test_a_mixed_step_reads_the_weights_once() -> None:
    mixed = StepWork.of(plan_of((0, 512), (99, 1)))
    apart = OPT_13B_A100.prefill_ms(mixed) + OPT_13B_A100.decode_ms(mixed)
    assert 1000 * OPT_13B_A100.seconds(mixed) == pytest.approx(apart - min(A, A_DECODE))


def test_a_cached_prefix_is_not_paid_for_again() -> None:
    new = NewRequest("a", [0] * 600, 600, request_of("a", [0], 1).params, 0, (), [], 400)
    work = StepWork.of(Plan(1, {"a": 200}, frozenset({"a"}), new=(new,), context=600))
    assert (work.prefill, work.squares, work.decodes, work.context) == (200, 600**2 - 400**2, 0, 0)


def test_the_profile_built_in_is_the_published_one() -> None:
    path = PUBLIC / "distserve" / "profiler-a100-80g.distserve.json"
    if not path.is_file():
        pytest.skip("the published profile is not beside this checkout (../shared/traces)")
    assert dataclasses.replace(StepCost.read(path), source=OPT_13B_A100.source) == OPT_13B_A100


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"facebook/opt-13b": {"1": {"prefill": [1, 2]}}})])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(TraceError, match="no profile of facebook/opt-13b"):
        StepCost.read(path)


def test_time_is_simulated_and_adds_up() -> None:
    """One request alone: its prefill, and then a decode step for each further token."""
    outcome = simulate([request_of("a", [0] * 100, 3)], SchedulerConfig(), KVManager(20, 16))
    prefill = (A + B * 100 + C * 100**2) / 1000
    decodes = [(A_DECODE + B_DECODE * context + C_DECODE) / 1000 for context in (101, 102)]
    assert list(outcome.ttft) == [pytest.approx(prefill)]
    assert list(outcome.itl) == pytest.approx(decodes)
    assert outcome.seconds == pytest.approx(prefill + sum(decodes))
    assert (outcome.finished, outcome.output_tokens, outcome.steps, outcome.prefill_tokens) == (1, 3, 3, 100)
    assert outcome.prefill_s == pytest.approx(prefill)


def test_idle_time_is_skipped_to_the_next_arrival() -> None:
    outcome = simulate(requests_of([(10, 1)] * 2, [5.0, 1000.0]), SchedulerConfig(), KVManager(20, 16))
    assert 995.0 < outcome.seconds < 995.1
    assert max(outcome.ttft) < 0.1


def test_every_step_leaves_tables_that_hold_what_was_computed() -> None:
    """The use of the pool is the manager's own account; here it is counted from the outside."""
    kv, seen = KVManager(41, 16), []

    def watch(scheduler: Scheduler, plan: Plan, outputs: list[RequestOutput], now: float) -> None:
        scheduler.check_integrity()
        for request in scheduler.running:
            blocks = -(-request.computed // kv.block_size)
            assert kv.held(request.request_id) >= blocks
            seen.append(kv.held(request.request_id) - blocks)

    outcome = simulate(requests_of([(20, 100)] * 30), SchedulerConfig(), kv, watch=watch)
    assert outcome.finished == 30
    assert outcome.preemptions > 0, "the pool was to be too small"
    assert max(seen) == 0
    assert 0.85 < outcome.useful_share < 0.97, "half a block of each request is empty on average"


def test_outputs_share_no_prefix() -> None:
    executor = SimulatedExecutor(OPT_13B_A100)
    plan = Plan(1, {"a": 1, "b": 1}, frozenset({"a", "b"}), context=2)
    sampled = [token for _ in range(3) for tokens in executor.submit(plan).result().tokens.values() for token in tokens]
    assert len(set(sampled)) == 6


def test_prompts_are_equal_as_far_as_their_blocks_are() -> None:
    first = prompt_of(TraceRow(0.0, 1300, 1, blocks=(4, 5, 6)))
    second = prompt_of(TraceRow(0.0, 1100, 1, blocks=(4, 5, 7)))
    assert (len(first), len(second)) == (1300, 1100)
    assert first[:1024] == second[:1024]
    assert first[1024] != second[1024]


def test_a_trace_played_faster_arrives_earlier() -> None:
    rows = [TraceRow(0.0, 5, 2, "a"), TraceRow(8.0, 6, 3, "b")]
    second = list(requests_of_trace(rows, 4.0))[1]
    assert (second.queued, second.prompt_len, second.max_tokens, second.tenant) == (2.0, 6, 3, "b")


def test_arrivals_have_the_rate_and_repeat_with_the_seed() -> None:
    moments = [at for at, _ in zip(poisson(5.0, 3), range(4001), strict=False)]
    assert moments == [at for at, _ in zip(poisson(5.0, 3), range(4001), strict=False)]
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(800, rel=0.06)


def test_a_request_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(RequestError, match="the KV pool holds"):
        simulate([request_of("a", [0] * 100, 500)], SchedulerConfig(), KVManager(20, 16))


def test_a_run_that_loses_a_block_does_not_pass() -> None:
    kv = KVManager(20, 16)
    taken = kv.pool.take(1)
    with pytest.raises(IntegrityError):
        simulate([request_of("a", [0] * 10, 2)], SchedulerConfig(), kv)
    kv.pool.release(taken)


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 5.0, 5.0]
    assert percentile([], 0.5) == 0.0


def test_a_percentile_has_the_nearest_rank() -> None:
    """By hand: rank ceil(q·n), counted from one."""
    hundred = [float(value) for value in range(1, 101)]
    assert [percentile(hundred, share) for share in (0.07, 0.5, 0.99, 0.991, 1.0)] == [7.0, 50.0, 99.0, 100.0, 100.0]
    assert percentile([1.0, 2.0], 0.5) == 1.0
    assert percentile([15.0, 20.0, 35.0, 40.0, 50.0], 0.4) == 20.0
    assert percentile([float(value) for value in range(1, 151)], 0.99) == 149.0
