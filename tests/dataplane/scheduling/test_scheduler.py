"""Who runs with how many tokens (DOMAIN 2.3, S1 to S6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, SupportsIndex

import pytest

from dataplane.protocol import FinishReason, RequestOutput
from dataplane.request import RequestError, RequestState
from dataplane.scheduling.accounting import MAX_TENANTS
from dataplane.scheduling.plan import StepResult, StepSeconds
from tests.factories.requests import ScriptedExecutor, generated, make_request, make_scheduler, run_to_end, step


def test_running_comes_before_waiting() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("old", range(4)))
    step(scheduler)
    scheduler.add(make_request("new", range(100, 120)))
    assert step(scheduler).tokens == {"old": 1, "new": 7}
    assert step(scheduler).tokens == {"old": 1, "new": 7}
    plan = step(scheduler)
    assert plan.tokens == {"old": 1, "new": 6}
    assert plan.samples == {"old", "new"}
    assert plan.prefill_tokens == 6


def test_a_new_request_travels_whole_and_a_running_one_as_differences() -> None:
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=6)
    scheduler.add(make_request("a", range(10)))
    first = step(scheduler)
    assert (first.new[0].tokens, first.new[0].blocks, first.new[0].computed) == (list(range(10)), [1, 2], 0)
    second = step(scheduler)
    assert second.new == ()
    assert (second.running[0].new_blocks, second.running[0].computed) == ([3], 6)
    third = step(scheduler)
    # It decodes, and its block has room: that it has a token says it all.
    assert (third.running, third.tokens) == ((), {"a": 1})


def test_what_is_told_of_a_request_goes_with_its_first_output_and_its_last() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("a", range(5), max_tokens=4))
    outputs = run_to_end(scheduler, ScriptedExecutor(lambda request_id, position: position))["a"]
    assert [output.token_ids for output in outputs] == [[5], [6], [7], [8]]
    assert [output.timing is not None for output in outputs] == [True, False, False, True]
    assert outputs[1] == RequestOutput(request_id="a", token_ids=[6])
    assert outputs[-1].finish is FinishReason.LENGTH


def test_at_most_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)] * 4, max_tokens=2))
    assert set(step(scheduler).tokens) == {"a", "b"}
    assert set(step(scheduler).tokens) == {"a", "b"}
    assert set(step(scheduler).tokens) == {"c"}


def test_waiting_order_is_priority_then_fair_tag_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority, tag in [("late", 0, 2.0), ("first", 0, 1.0), ("second", 0, 1.0), ("urgent", -1, 9.0)]:
        scheduler.add(make_request(name, [ord(name[0])] * 4, max_tokens=1, priority=priority, fair_tag=tag))
    order = [next(iter(step(scheduler).tokens)) for _ in range(4)]
    assert order == ["urgent", "first", "second", "late"]


def test_the_newest_running_request_is_preempted_and_comes_back_first() -> None:
    """Two requests of two blocks each in a pool of four: when both want a third, the newer gives way."""
    scheduler = make_scheduler(num_blocks=5, block_size=4, caching=False, watermark=0.0)
    executor = ScriptedExecutor(lambda request_id, position: 100 + position)
    scheduler.add(make_request("old", range(7), max_tokens=6))
    scheduler.add(make_request("new", range(50, 57), max_tokens=6))
    scheduler.add(make_request("next", range(80, 84), max_tokens=2))
    admitted: list[str] = []
    outputs = run_to_end(
        scheduler, executor, each_step=lambda plan: admitted.extend(new.request_id for new in plan.new)
    )
    assert admitted[:4] == ["old", "new", "new", "next"]
    assert outputs["old"][-1].preemptions == 0
    assert outputs["new"][-1].preemptions == 1
    assert generated(outputs["new"]) == [100 + position for position in range(7, 13)]
    assert scheduler.kv.free_blocks == 4


def test_no_admission_in_the_step_that_preempts() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, caching=False, watermark=0.0)
    scheduler.add(make_request("old", range(8), max_tokens=8))
    scheduler.add(make_request("new", range(50, 58), max_tokens=8))
    step(scheduler)
    scheduler.add(make_request("tiny", [9], max_tokens=1))
    plan = step(scheduler)
    assert set(plan.tokens) == {"old"}
    assert plan.dropped == ("new",)


def test_admission_leaves_the_watermark_free_unless_nobody_runs() -> None:
    scheduler = make_scheduler(num_blocks=11, block_size=4, watermark=0.2, caching=False)
    scheduler.add(make_request("big", range(40), max_tokens=1))
    assert step(scheduler).tokens == {"big": 40}
    scheduler.add(make_request("a", [1] * 16, max_tokens=3))
    scheduler.add(make_request("b", [2] * 20, max_tokens=3))
    assert set(step(scheduler).tokens) == {"a"}
    assert [set(step(scheduler).tokens) for _ in range(3)] == [{"a"}, {"a"}, {"b"}]


def test_a_watermark_saves_preemptions() -> None:
    """The same burst with and without: growth is paid by waiting, not by starting over."""
    counts = {}
    for watermark in (0.0, 0.3):
        scheduler = make_scheduler(num_blocks=33, block_size=4, caching=False, watermark=watermark)
        for index in range(12):
            scheduler.add(make_request(str(index), [index] * 15, max_tokens=12))
        run_to_end(scheduler, ScriptedExecutor(lambda _, position: position))
        counts[watermark] = scheduler.accounts.scheduling.preemptions.get("recompute", 0)
    assert counts[0.0] > 0
    assert counts[0.3] < counts[0.0]


def test_abort_frees_blocks_at_once_wherever_the_request_stands() -> None:
    scheduler = make_scheduler(num_blocks=21, max_num_seqs=1)
    scheduler.add(make_request("running", range(100)))
    scheduler.add(make_request("waiting", range(200, 300)))
    step(scheduler)
    outputs = scheduler.abort(["running", "unknown", "waiting"], 5.0)
    assert [(output.request_id, output.finish) for output in outputs] == [
        ("running", FinishReason.ABORT),
        ("waiting", FinishReason.ABORT),
    ]
    assert scheduler.kv.free_blocks == 20
    assert not scheduler.has_work()
    scheduler.check_integrity()
    assert step(scheduler).dropped == ("running",)


def test_a_result_for_a_request_aborted_meanwhile_is_passed_over() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("gone", range(4)))
    scheduler.add(make_request("here", range(8, 12)))
    plan = scheduler.plan(0.0)
    scheduler.abort(["gone"], 0.5)
    outputs = scheduler.commit(plan, StepResult({"gone": [1], "here": [1]}), 1.0)
    assert [output.request_id for output in outputs] == ["here"]
    scheduler.check_integrity()


def test_an_executor_error_ends_the_request_and_forgets_its_blocks() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("bad", range(9)))
    plan = scheduler.plan(0.0)
    (output,) = scheduler.commit(plan, StepResult({"bad": [0]}, {"bad": "not a number"}), 1.0)
    assert (output.finish, output.error, output.token_ids) == (FinishReason.ERROR, "not a number", [])
    assert scheduler.kv.match(make_request("again", range(9))).tokens == 0
    scheduler.check_integrity()
    assert scheduler.plan(2.0).scrub == (1, 2, 3)
    assert scheduler.plan(3.0).scrub == ()


def test_requests_of_one_step_share_what_it_computes() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [*range(32), 100]))
    scheduler.add(make_request("b", [*range(32), 200]))
    assert step(scheduler).tokens == {"a": 33, "b": 1}
    assert scheduler.accounts.memory.prefix_queries == 66
    assert scheduler.accounts.memory.prefix_hits == 32


def test_hits_after_a_preemption_are_counted_apart() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4, watermark=0.0)
    scheduler.add(make_request("old", range(14), max_tokens=16))
    scheduler.add(make_request("new", range(50, 64), max_tokens=8))
    run_to_end(scheduler, ScriptedExecutor(lambda _, position: position))
    assert scheduler.accounts.scheduling.preemptions == {"recompute": 1}
    assert (scheduler.accounts.memory.prefix_queries, scheduler.accounts.memory.prefix_hits) == (28, 0)
    assert scheduler.accounts.memory.recompute_queries > 0
    assert (scheduler.kv.recent_hits.requests, scheduler.kv.recent_hits.rate) == (2, 0.0)
    assert scheduler.accounts.scheduling.prompt_tokens == 28


def test_service_is_counted_per_tenant() -> None:
    scheduler = make_scheduler()
    for name, tenant in (("a", "acme"), ("b", "beta"), ("c", "acme")):
        scheduler.add(make_request(name, range(33), max_tokens=2, tenant=tenant))
    now = 0.0
    while scheduler.has_work():
        plan = scheduler.plan(now)
        seconds = StepSeconds(forward=0.5)
        scheduler.commit(plan, StepResult({name: [7] for name in plan.samples}, seconds=seconds), now + 1.0)
        now += 2.0
    acme, beta = scheduler.accounts.scheduling.tenants["acme"], scheduler.accounts.scheduling.tenants["beta"]
    assert (acme.prompt_tokens, acme.cached_tokens, acme.output_tokens, acme.finished) == (66, 32, 4, 2)
    assert (beta.prompt_tokens, beta.cached_tokens, beta.output_tokens, beta.finished) == (33, 0, 2, 1)
    assert acme.device_seconds + beta.device_seconds == pytest.approx(1.0)
    # Three blocks each from the first plan (t=0) to the second commit (t=3).
    assert beta.kv_block_seconds == pytest.approx(9.0)
    assert acme.kv_block_seconds == pytest.approx(18.0)


def test_tenant_counters_are_bounded() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4096, max_num_seqs=4096)
    for index in range(MAX_TENANTS + 5):
        scheduler.add(make_request(str(index), [1], max_tokens=1, tenant=f"t{index}"))
    run_to_end(scheduler, ScriptedExecutor(lambda _, position: position))
    assert len(scheduler.accounts.scheduling.tenants) == MAX_TENANTS + 1
    assert scheduler.accounts.scheduling.tenants["other"].finished == 5


def test_gaps_of_decodes_that_share_a_step_with_prefill_are_recorded() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(4), max_tokens=8))
    step(scheduler, 1.0)
    step(scheduler, 2.0)
    assert scheduler.accounts.service.itl_with_prefill is None
    scheduler.add(make_request("b", range(50, 90)))
    step(scheduler, 4.0)
    assert scheduler.accounts.service.itl_with_prefill is not None
    assert scheduler.accounts.service.itl_with_prefill.count == 1
    assert scheduler.accounts.service.itl_with_prefill.total == pytest.approx(2.0)


def test_empty_slots_are_the_unfilled_ends_of_tables() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(17)))
    scheduler.add(make_request("b", range(100, 132)))
    step(scheduler)
    assert scheduler.empty_slots == 15


def test_what_can_never_fit_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    scheduler.add(make_request("fits", range(4), max_tokens=5))
    with pytest.raises(RequestError) as refused:
        scheduler.add(make_request("large", range(4), max_tokens=6))
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(RequestError) as refused:
        scheduler.add(make_request("fits", range(2)))
    assert refused.value.code == "duplicate_request_id"


def test_the_waiting_queue_is_bounded() -> None:
    scheduler = make_scheduler(max_waiting=1)
    scheduler.add(make_request("a", range(4)))
    with pytest.raises(RequestError) as refused:
        scheduler.add(make_request("b", range(4)))
    assert refused.value.code == "engine_overloaded"


def test_a_preempted_request_keeps_its_first_times_and_tokens() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, caching=False, watermark=0.0)
    old, new = make_request("old", range(8), max_tokens=4), make_request("new", range(50, 58), max_tokens=4)
    scheduler.add(old)
    scheduler.add(new)
    step(scheduler, 1.0)
    step(scheduler, 2.0)
    assert new.state is RequestState.PREEMPTED
    assert (new.scheduled, new.first_token, new.generated, new.computed) == (1.0, 1.0, 1, 0)


class WatchedTokens(list[int]):
    """Counts the tokens that are read through it."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        WatchedTokens.read += len(self)
        return super().__iter__()

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        WatchedTokens.read += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_step_does_not_read_history(steps_in_flight: int) -> None:
    """Of each token that is generated, two are read: once for the block's hash, once for its event."""
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=4096, steps_in_flight=steps_in_flight)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)] * 1000, max_tokens=500))
    step(scheduler)
    for request in scheduler.running:
        request.tokens = WatchedTokens(request.tokens)
    WatchedTokens.read = 0
    for _ in range(200):
        assert step(scheduler).total_tokens == 3
    assert 0 < WatchedTokens.read <= 2 * 3 * 200 + 2 * 3 * 4
