"""Who gives blocks up, and how KV comes back."""

from __future__ import annotations

import pytest

from dataplane.scheduling.config import Preemption, SchedulerConfig
from dataplane.scheduling.plan import Plan, StepResult, StepSeconds, Transfers
from dataplane.scheduling.preemption import PreemptionPolicy
from dataplane.scheduling.scheduler import Scheduler
from tests.factories.requests import KVExecutor, generated, make_request, make_scheduler, run_to_end, step, undisturbed

SMALL = {"num_blocks": 5, "block_size": 4, "caching": False, "watermark": 0.0}


def two(scheduler: Scheduler) -> None:
    """Two requests that fill a pool of four blocks with their prompts."""
    scheduler.add(make_request("old", range(8), max_tokens=3))
    scheduler.add(make_request("new", range(50, 58), max_tokens=3))


# --------------------------------------------------------------------------------------------------- swap or recompute


def test_swap_is_chosen_beyond_the_crossing_point() -> None:
    """2·k·s / BW against c·s²: with k = 1000 bytes, BW = 1e6 B/s and c = 1e-5 s they cross at s = 200."""
    config = SchedulerConfig(preemption=Preemption.AUTO, swap_bytes_per_s=1e6)
    policy = PreemptionPolicy(config, 1000, lambda tokens: 1e-5 * tokens**2)
    assert [policy.swaps(tokens) for tokens in (1, 199, 201, 5000)] == [False, False, True, True]


def test_swap_is_chosen_by_speed_alone_where_prefill_is_linear() -> None:
    """2·k / BW is 0.2 ms a token: quicker than 1,000 tokens/s of prefill, slower than 10,000."""
    for speed, swaps in ((1e3, True), (1e4, False)):
        config = SchedulerConfig(preemption=Preemption.AUTO, swap_bytes_per_s=1e7, prefill_tokens_per_s=speed)
        assert PreemptionPolicy(config, 1000).swaps(64) is swaps


def test_the_prefill_speed_is_learnt_from_steps_that_are_mostly_prefill() -> None:
    policy = PreemptionPolicy(
        SchedulerConfig(preemption=Preemption.AUTO, swap_bytes_per_s=1e7, prefill_tokens_per_s=1e3), 1000
    )
    decode = Plan(step=1, tokens={"a": 1, "b": 1}, samples=frozenset("ab"))
    prefill = Plan(step=2, tokens={"a": 100}, samples=frozenset("a"), prefill_tokens=100)
    policy.observe(decode, 1e-6)
    assert policy.swaps(64)
    policy.observe(prefill, 0.005)
    assert not policy.swaps(64)


@pytest.mark.parametrize(("mode", "swaps"), [(Preemption.SWAP, True), (Preemption.RECOMPUTE, False)])
def test_a_mode_may_be_fixed(mode: Preemption, swaps: bool) -> None:
    assert PreemptionPolicy(SchedulerConfig(preemption=mode), 10**9, lambda _: 0.0).swaps(1) is swaps


def test_a_swapped_request_goes_on_where_it_was() -> None:
    scheduler = make_scheduler(**SMALL, host_blocks=2, preemption=Preemption.SWAP)
    two(scheduler)
    plans = [step(scheduler) for _ in range(5)]
    assert [plan.tokens for plan in plans] == [{"old": 8, "new": 8}, {"old": 1}, {"old": 1}, {"new": 1}, {"new": 1}]
    assert plans[1].dropped == ("new",)
    assert plans[1].transfers == Transfers(swap_out=((3, 0), (4, 1)))
    (back,) = plans[3].new
    assert (back.request_id, back.computed, back.tokens) == ("new", 8, [*range(50, 58), 0])
    assert plans[3].transfers == Transfers(swap_in=tuple(zip((0, 1), back.blocks[:2], strict=True)))
    assert scheduler.accounts.scheduling.preemptions == {"swap": 1}
    assert (scheduler.kv.swapped_out, scheduler.kv.swapped_in, scheduler.kv.host.used) == (2, 2, 0)


def test_a_full_host_means_recompute() -> None:
    scheduler = make_scheduler(**SMALL, host_blocks=1, preemption=Preemption.SWAP)
    two(scheduler)
    plans = [step(scheduler) for _ in range(4)]
    assert [plan.tokens for plan in plans] == [{"old": 8, "new": 8}, {"old": 1}, {"old": 1}, {"new": 9}]
    assert not any(plan.transfers for plan in plans)
    assert scheduler.accounts.scheduling.preemptions == {"recompute": 1}


def test_an_aborted_swapped_request_leaves_host_memory() -> None:
    scheduler = make_scheduler(**SMALL, host_blocks=2, preemption=Preemption.SWAP)
    two(scheduler)
    step(scheduler)
    step(scheduler)
    assert scheduler.kv.host.used == 2
    scheduler.abort(["new"], 0.0)
    assert scheduler.kv.host.used == 0
    scheduler.check_integrity()


@pytest.mark.parametrize("mode", list(Preemption))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_tokens_are_those_of_the_undisturbed_run_however_kv_comes_back(mode: Preemption, steps_in_flight: int) -> None:
    prompts = {str(index): [index] * (5 + index) for index in range(5)}
    executor = KVExecutor(4, int)
    scheduler = make_scheduler(
        num_blocks=9,
        block_size=4,
        host_blocks=20,
        watermark=0.0,
        preemption=mode,
        kv_bytes=1,
        prefill_seconds=lambda tokens: 1e-9 if tokens < 9 else 1.0,
        steps_in_flight=steps_in_flight,
    )
    for name, prompt in prompts.items():
        scheduler.add(make_request(name, prompt, max_tokens=12))
    outputs = run_to_end(scheduler, executor)
    counts = scheduler.accounts.scheduling.preemptions
    assert set(counts) == ({"swap", "recompute"} if mode is Preemption.AUTO else {mode.value})
    assert {name: generated(found) for name, found in outputs.items()} == {
        name: undisturbed(prompt, int(name), 12) for name, prompt in prompts.items()
    }
    assert scheduler.kv.free_blocks == 8


# ------------------------------------------------------------------------------------------------------ who gives way


def test_the_lowest_priority_gives_way_before_the_newest() -> None:
    scheduler = make_scheduler(**SMALL)
    scheduler.add(make_request("low", range(8), max_tokens=3, priority=5))
    step(scheduler)
    scheduler.add(make_request("high", range(50, 54), max_tokens=8, priority=0))
    assert step(scheduler).tokens == {"low": 1, "high": 4}
    # "high" needs a block that is not there, and takes it from the older request.
    plan = step(scheduler)
    assert (plan.tokens, plan.dropped) == ({"high": 1}, ("low",))


def test_decodes_are_never_skipped_while_a_prefill_runs() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", range(30), max_tokens=4))
    assert step(scheduler).tokens == {"a": 8}
    scheduler.add(make_request("b", range(50, 52), max_tokens=9))
    # The older prefill comes before the admission, and after the decode that this becomes.
    assert [step(scheduler).tokens for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 6, "b": 2}, {"a": 1, "b": 1}]
    scheduler.add(make_request("c", range(100, 120), max_tokens=4))
    assert step(scheduler).tokens == {"a": 1, "b": 1, "c": 6}
    assert step(scheduler).tokens == {"a": 1, "b": 1, "c": 6}


def test_a_prefill_waits_with_what_it_has_rather_than_start_over() -> None:
    """Decodes come first: the prefill behind them finds no block, holds its own, and goes on when they end."""
    scheduler = make_scheduler(**SMALL, max_num_batched_tokens=4)
    scheduler.add(make_request("d", range(5), max_tokens=4))
    step(scheduler)
    step(scheduler)
    scheduler.add(make_request("p", range(50, 62), max_tokens=1))
    plans = [step(scheduler).tokens for _ in range(5)]
    assert plans == [{"d": 1, "p": 3}, {"d": 1, "p": 3}, {"d": 1}, {"p": 4}, {"p": 2}]
    assert scheduler.accounts.scheduling.preemptions == {}


def test_recomputed_prompt_tokens_and_their_time_are_charged_once() -> None:
    scheduler = make_scheduler(**SMALL)
    two(scheduler)
    while scheduler.has_work():
        plan = scheduler.plan(0.0)
        result = StepResult({name: [0] for name in plan.samples}, seconds=StepSeconds(forward=1.0))
        scheduler.commit(plan, result, 0.0)
    assert scheduler.accounts.scheduling.prompt_tokens == 16
    assert scheduler.accounts.scheduling.tokens_scheduled == 8 + 8 + 2 + 9 + 1


def test_who_is_swapped_out_with_what_has_failed_since_is_computed_anew() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4, host_blocks=8, preemption=Preemption.SWAP, watermark=0.0)
    executor = KVExecutor(4, lambda _: 1)
    scheduler.add(make_request("bad", range(9), max_tokens=16))
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, executor.run(plan), 0.0)
    scheduler.add(make_request("good", [*range(8), 90], max_tokens=12))
    tokens: list[int] = []
    while not scheduler.kv.is_swapped("good"):
        plan = scheduler.plan(0.0)
        tokens += generated(o for o in scheduler.commit(plan, executor.run(plan), 0.0) if o.request_id == "good")
    plan = scheduler.plan(0.0)
    result = executor.run(plan)
    scheduler.commit(plan, StepResult(result.tokens, {"bad": "not a number"}), 0.0)
    assert not scheduler.kv.trusts(scheduler._requests["good"])
    starts = {}
    while scheduler.has_work():
        plan = scheduler.plan(0.0)
        starts |= {new.request_id: new.computed for new in plan.new}
        tokens += generated(scheduler.commit(plan, executor.run(plan), 0.0))
        scheduler.check_integrity()
    assert starts == {"good": 0}
    assert tokens == undisturbed([*range(8), 90], 1, 12)
    assert scheduler.kv.host.used == scheduler.kv.pool.used == 0
