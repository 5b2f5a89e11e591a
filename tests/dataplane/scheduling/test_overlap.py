"""Steps planned before the result of the last one is in."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from dataplane.errors import IntegrityError
from dataplane.protocol import FinishReason, RequestOutput
from dataplane.request import RequestError, RequestState
from dataplane.scheduling.plan import Plan, StepResult
from dataplane.scheduling.scheduler import Scheduler
from tests.factories.requests import KVExecutor, generated, make_request, make_scheduler, undisturbed


def zeros(plan: Plan) -> StepResult:
    return StepResult({request_id: [0] for request_id in plan.samples})


def overlapped(scheduler: Scheduler, executor: KVExecutor) -> dict[str, list[RequestOutput]]:
    """Keep two steps in flight until nothing is left."""
    outputs: dict[str, list[RequestOutput]] = {}
    flights: deque[tuple[Plan, StepResult]] = deque()
    while scheduler.has_work():
        while len(flights) < 2:
            plan = scheduler.plan(0.0)
            if plan.tokens or plan.told:
                flights.append((plan, executor.run(plan)))
            if not plan.tokens:
                break
        for output in scheduler.commit(*flights.popleft(), 0.0):
            outputs.setdefault(output.request_id, []).append(output)
        scheduler.check_integrity()
    return outputs


def test_the_next_token_is_planned_before_the_last_is_known() -> None:
    scheduler = make_scheduler(steps_in_flight=2, eos=[2])
    scheduler.add(make_request("a", range(4), max_tokens=3))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert (first.tokens, first.samples) == ({"a": 4}, {"a"})
    assert (second.tokens, second.samples) == ({"a": 1}, {"a"})
    assert scheduler.running[0].computed == 5
    assert second.prefill_tokens == 0
    (output,) = scheduler.commit(first, zeros(first), 1.0)
    assert output.token_ids == [0]
    third = scheduler.plan(1.0)
    assert third.tokens == {"a": 1}
    # Three tokens are all there may be: nothing is planned beyond them.
    assert scheduler.plan(1.0).tokens == {}
    scheduler.commit(second, zeros(second), 2.0)
    assert scheduler.plan(2.0).tokens == {}
    (output,) = scheduler.commit(third, zeros(third), 3.0)
    assert output.finish is FinishReason.LENGTH
    assert scheduler.accounts.scheduling.wasted_tokens == 0
    assert not scheduler.has_work()


def test_without_overlap_a_request_waits_for_its_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(4), max_tokens=3))
    assert [scheduler.plan(0.0).tokens for _ in range(2)] == [{"a": 4}, {}]


def test_a_step_for_a_request_that_stopped_meanwhile_is_wasted_and_holds_its_blocks() -> None:
    scheduler = make_scheduler(steps_in_flight=2, eos=[2], num_blocks=10, block_size=4)
    scheduler.add(make_request("a", range(8), max_tokens=9))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    (output,) = scheduler.commit(first, StepResult({"a": [2]}), 1.0)
    assert output.finish is FinishReason.STOP
    assert scheduler.kv.held("a") == 3
    assert scheduler.has_work()
    scheduler.check_integrity()
    assert scheduler.commit(second, StepResult({"a": [7]}), 2.0) == []
    assert scheduler.kv.free_blocks == 9
    assert scheduler.accounts.scheduling.wasted_tokens == 1
    assert scheduler.accounts.scheduling.output_tokens == 1
    assert not scheduler.has_work()


def test_an_id_may_come_again_when_its_last_step_is_no_longer_in_flight() -> None:
    scheduler = make_scheduler(steps_in_flight=2, block_size=4)
    scheduler.add(make_request("a", range(4)))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.abort(["a"], 0.5)
    for step in first, second:
        with pytest.raises(RequestError, match="the request id a is in use"):
            scheduler.add(make_request("a", range(50, 54), max_tokens=1))
        assert scheduler.commit(step, zeros(step), 1.0) == []
    scheduler.add(make_request("a", range(50, 54), max_tokens=1))
    plan = scheduler.plan(2.0)
    assert (plan.tokens, plan.new[0].tokens) == ({"a": 4}, [50, 51, 52, 53])
    (output,) = scheduler.commit(plan, zeros(plan), 3.0)
    assert output.finish is FinishReason.LENGTH


def test_nobody_joins_the_blocks_of_a_request_whose_failure_is_known() -> None:
    scheduler = make_scheduler(steps_in_flight=2, block_size=4)
    scheduler.add(make_request("bad", range(9), max_tokens=9))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.commit(first, StepResult({"bad": [0]}, {"bad": "not a number"}), 0.0)
    scheduler.add(make_request("new", range(9), max_tokens=9))
    assert scheduler.plan(0.0).tokens == {"new": 9}
    scheduler.commit(second, StepResult({"bad": [0]}, {"bad": "not a number"}), 0.0)
    scheduler.check_integrity()


def test_what_a_step_spoils_after_its_request_has_ended_is_not_found_either() -> None:
    scheduler = make_scheduler(steps_in_flight=2, block_size=4)
    scheduler.add(make_request("gone", range(9), max_tokens=9))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.commit(first, zeros(first), 0.0)
    scheduler.abort(["gone"], 0.0)
    scheduler.commit(second, StepResult({"gone": [0]}, {"gone": "not a number"}), 0.0)
    assert scheduler.kv.match(make_request("new", range(9))).tokens == 0
    assert scheduler.plan(1.0).scrub == (1, 2, 3)


@pytest.mark.parametrize("first", ["bad", "gone"])
def test_who_leaves_in_the_step_that_shows_a_failure_leaves_nothing_to_be_found(first: str) -> None:
    """It shares the failed one's blocks, and its own come after them."""
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("seed", range(9), max_tokens=1))
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, zeros(plan), 0.0)
    lengths = {"bad": 10, "gone": 40}
    for name in (first, *(lengths.keys() - {first})):
        scheduler.add(make_request(name, range(lengths[name]), max_tokens=20))
    plan = scheduler.plan(0.0)
    assert set(plan.tokens) == {"bad", "gone"}
    held = {block for name in lengths for block in scheduler.kv.table(name)}
    scheduler.abort(["gone"], 0.0)
    scheduler.commit(plan, StepResult({"bad": [0]}, {"bad": "not a number"}), 0.0)
    assert scheduler.kv.match(make_request("next", range(40))).tokens == 0
    cleared = set(scheduler.plan(1.0).scrub)
    assert held <= cleared
    assert len(cleared) == len(held) + 1, "and what the first gave back unnamed, which may follow what failed"


def test_what_a_request_asked_for_itself_costs_nobody_the_cache_though_it_has_left() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("good", [*range(16), 90], max_tokens=20))
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, zeros(plan), 0.0)
    scheduler.add(make_request("bad", [*range(16), 91], max_tokens=20))
    plan = scheduler.plan(0.0)
    scheduler.abort(["bad"], 0.0)
    refusal = RequestError("no token is left", "constraint_unsatisfiable", "bad_words")
    scheduler.commit(plan, replace(zeros(plan), errors={"bad": "no token is left"}, refusals={"bad": refusal}), 0.0)
    assert scheduler.kv.match(make_request("next", [*range(16), 92])).tokens == 16


def test_a_failed_request_is_scrubbed_when_its_last_step_is_done() -> None:
    scheduler = make_scheduler(steps_in_flight=2, block_size=4)
    scheduler.add(make_request("bad", range(8)))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    (output,) = scheduler.commit(first, StepResult({"bad": [0]}, {"bad": "not a number"}), 1.0)
    assert output.finish is FinishReason.ERROR
    assert scheduler.plan(1.0).scrub == ()
    scheduler.commit(second, StepResult({"bad": [0]}, {"bad": "not a number"}), 2.0)
    assert scheduler.plan(2.0).scrub == (1, 2, 3)
    assert scheduler.kv.match(make_request("again", range(8))).tokens == 0


def test_nobody_in_flight_is_preempted() -> None:
    """Two requests fill four blocks; the older wants a fifth while the newer's step is out: one empty step."""
    scheduler = make_scheduler(
        steps_in_flight=2, num_blocks=5, block_size=4, caching=False, watermark=0.0, preemption="recompute"
    )
    old, new = make_request("old", range(8), max_tokens=3), make_request("new", range(50, 58), max_tokens=3)
    scheduler.add(old)
    scheduler.add(new)
    first = scheduler.plan(0.0)
    assert first.tokens == {"old": 8, "new": 8}
    assert scheduler.plan(0.0).tokens == {}
    assert new.state is RequestState.RUNNING
    scheduler.commit(first, zeros(first), 1.0)
    plan = scheduler.plan(1.0)
    assert (plan.tokens, plan.dropped) == ({"old": 1}, ("new",))
    assert (new.state, new.placeholders, new.tokens[8:]) == (RequestState.PREEMPTED, 0, [0])
    scheduler.check_integrity()


def test_a_chunk_may_follow_a_chunk_in_flight() -> None:
    scheduler = make_scheduler(steps_in_flight=2, max_num_batched_tokens=4)
    scheduler.add(make_request("a", range(10), max_tokens=2))
    plans = [scheduler.plan(0.0) for _ in range(4)]
    assert [plan.tokens for plan in plans] == [{"a": 4}, {"a": 4}, {"a": 2}, {"a": 1}]
    assert [bool(plan.samples) for plan in plans] == [False, False, True, True]
    for plan in plans:
        scheduler.commit(plan, zeros(plan), 1.0)
        scheduler.check_integrity()
    assert not scheduler.has_work()


def test_results_are_taken_in_the_order_of_their_plans() -> None:
    scheduler = make_scheduler(steps_in_flight=2)
    scheduler.add(make_request("a", range(4)))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    with pytest.raises(IntegrityError, match="result of step 2 came; the next is that of 1"):
        scheduler.commit(second, zeros(second), 1.0)
    scheduler.commit(first, zeros(first), 1.0)
    with pytest.raises(IntegrityError, match="result of step 1 came; the next is that of 2"):
        scheduler.commit(first, zeros(first), 1.0)


def test_tokens_are_those_of_the_synchronous_run_and_a_step_is_wasted_for_each_stop() -> None:
    prompts = {str(index): [index] * (3 + 2 * index) for index in range(8)}
    eos = undisturbed(prompts["3"], 3, 15)[4]
    scheduler = make_scheduler(
        steps_in_flight=2, num_blocks=100, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, eos=[eos]
    )
    for name, prompt in prompts.items():
        scheduler.add(make_request(name, prompt, max_tokens=15))
    outputs = overlapped(scheduler, KVExecutor(4, int))
    stopped = 0
    for name, prompt in prompts.items():
        whole = undisturbed(prompt, int(name), 15)
        expected = whole[: whole.index(eos) + 1] if eos in whole else whole
        assert generated(outputs[name]) == expected
        stopped += outputs[name][-1].finish is FinishReason.STOP and len(expected) < 15
    assert stopped > 0
    assert scheduler.accounts.scheduling.wasted_tokens == stopped
    assert scheduler.kv.free_blocks == 99
