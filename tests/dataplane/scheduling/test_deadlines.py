"""Requests that waited for too long."""

from __future__ import annotations

from dataplane.protocol import FinishReason
from dataplane.request import RequestState
from dataplane.scheduling.deadlines import Deadlines
from dataplane.scheduling.plan import StepResult
from tests.factories.requests import make_request, make_scheduler, step


def test_those_whose_moment_came_are_told_of_once_and_in_order() -> None:
    deadlines = Deadlines()
    requests = [make_request(name, [1], deadline=at) for name, at in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("x", None))]
    for request in requests:
        deadlines.watch(request)
    assert deadlines.next_at == 1.0
    assert [request.request_id for request in deadlines.due(2.0)] == ["a", "b"]
    assert deadlines.due(2.0) == []
    deadlines.forget(requests[0])
    deadlines.forget(requests[1])
    assert deadlines.due(9.0) == []


def test_a_request_that_waits_past_its_deadline_ends_with_the_next_output() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("runs", range(4)))
    scheduler.add(make_request("late", range(4), deadline=5.0, forks=()))
    assert step(scheduler, 5.0 - 1e-9).tokens == {"runs": 4}
    plan = scheduler.plan(5.0)
    outputs = scheduler.commit(plan, StepResult({"runs": [0]}), 5.1)
    assert [(output.request_id, output.finish) for output in outputs] == [("late", FinishReason.ERROR), ("runs", None)]
    assert outputs[0].error == "deadline_exceeded: the request waited for longer than its deadline allows"
    assert len(scheduler.waiting) == 0


def test_a_request_that_runs_by_its_deadline_goes_on() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", range(12), max_tokens=1, deadline=5.0))
    assert [step(scheduler, now).tokens for now in (4.0, 6.0, 7.0)] == [{"a": 4}] * 3
    assert not scheduler.has_work()


def test_an_engine_with_nothing_else_to_do_still_says_so() -> None:
    scheduler = make_scheduler(batching="dynamic", batch_window_s=9.0)
    scheduler.add(make_request("a", range(4), deadline=5.0, forks=("b",)))
    assert scheduler.plan(0.0).tokens == {}
    assert scheduler.wakes_at() == 5.0
    plan = scheduler.plan(5.0)
    assert plan.tokens == {}
    assert scheduler.has_work()
    outputs = scheduler.commit(plan, StepResult({}), 5.0)
    assert [(output.request_id, output.finish) for output in outputs] == [
        ("a", FinishReason.ERROR),
        ("b", FinishReason.ERROR),
    ]
    assert not scheduler.has_work()


def test_a_preempted_request_is_late_only_without_a_first_token() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, caching=False, watermark=0.0)
    old = make_request("old", range(8), max_tokens=9)
    new = make_request("new", range(50, 58), max_tokens=9, deadline=5.0)
    scheduler.add(old)
    scheduler.add(new)
    step(scheduler, 1.0)
    step(scheduler, 2.0)
    assert (new.state, new.generated) == (RequestState.PREEMPTED, 1)
    step(scheduler, 9.0)
    assert new.state is RequestState.PREEMPTED

    scheduler = make_scheduler(
        num_blocks=5, block_size=4, caching=False, watermark=0.0, max_num_batched_tokens=8, long_prefill_threshold=4
    )
    old = make_request("old", range(5), max_tokens=12)
    new = make_request("new", range(50, 62), max_tokens=4, deadline=3.5)
    scheduler.add(old)
    scheduler.add(new)
    for now in (1.0, 2.0, 3.0):
        step(scheduler, now)
    assert (new.state, new.generated) == (RequestState.RUNNING, 0)
    for now in (4.0, 5.0, 6.0, 7.0):
        step(scheduler, now)
    assert new.state is RequestState.FINISHED_ERROR
