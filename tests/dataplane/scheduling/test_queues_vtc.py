"""The fair order: who goes next, what is charged to whom, and that idleness earns nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.request import Request, RequestState
from dataplane.scheduling.config import QueueOrder, SchedulerConfig
from dataplane.scheduling.queues import Queue, make_queue
from dataplane.scheduling.vtc import TokenCharges, VTCOrder
from tests.factories.requests import make_request

NUMBERS = itertools.count()


def vtc(weights: dict[str, float] | None = None, **config: Any) -> Queue:
    return make_queue(SchedulerConfig(order=QueueOrder.VTC, **config), weights)


def ask(queue: Queue, tenant: str, tokens: int = 10, **fields: Any) -> Request:
    request = make_request(f"{tenant}{next(NUMBERS)}", [1] * tokens, tenant=tenant, **fields)
    queue.push(request)
    return request


def admit(queue: Queue, cached: int = 0) -> Request:
    """Take who is next and charge its prompt."""
    request = queue.pop()
    queue.served(request, input_tokens=request.prompt_len - cached, cached_tokens=cached)
    return request


def end(queue: Queue, request: Request) -> None:
    request.state = RequestState.FINISHED_STOPPED
    queue.finished(request)


def turns(queue: Queue, count: int) -> str:
    return "".join(admit(queue).tenant for _ in range(count))


def test_tenants_alternate_however_many_requests_one_of_them_queues() -> None:
    queue = vtc()
    for _ in range(20):
        ask(queue, "a")
    for _ in range(3):
        ask(queue, "b")
    assert turns(queue, 8) == "abababaa"


def test_output_counts_twice_and_cached_input_a_quarter() -> None:
    queue = vtc()
    for tenant in "ab":
        for _ in range(4):
            ask(queue, tenant, 100)
    first = admit(queue)  # a: 100
    admit(queue, cached=80)  # b: 20 + 20
    assert admit(queue).tenant == "b"  # b: 140
    queue.served(first, output_tokens=19)  # a: 138
    assert queue.peek().tenant == "a"
    queue.served(first, output_tokens=2)  # a: 142
    assert queue.peek().tenant == "b"


def test_a_tenant_of_twice_the_weight_gets_twice_the_service() -> None:
    queue = vtc({"b": 2.0})
    for _ in range(60):
        ask(queue, "a")
        ask(queue, "b")
    assert turns(queue, 60).count("b") == 40
    with pytest.raises(ValueError, match="the weight of tenant 'c' must be positive, got 0"):
        vtc({"c": 0.0})


def test_a_new_tenant_starts_level_with_the_least_served_and_gains_no_credit() -> None:
    queue = vtc()
    for _ in range(50):
        ask(queue, "a")
        ask(queue, "b")
    turns(queue, 40)
    for _ in range(20):
        ask(queue, "late")
    assert turns(queue, 30).count("late") == 10


def test_one_that_was_idle_for_long_is_lifted_too() -> None:
    queue = vtc()
    end(queue, (ask(queue, "idle"), admit(queue))[1])
    for _ in range(100):
        ask(queue, "a")
    turns(queue, 50)
    for _ in range(20):
        ask(queue, "idle")
    assert turns(queue, 10).count("idle") == 5


def test_one_that_comes_back_in_debt_keeps_its_debt() -> None:
    queue = vtc()
    ask(queue, "greedy", 10)
    greedy = admit(queue)
    queue.served(greedy, output_tokens=20)  # 50
    for _ in range(20):
        ask(queue, "a")  # lifted to 50: greedy was the last to leave
    turns(queue, 4)  # 90
    queue.served(greedy, output_tokens=40)  # 130
    end(queue, greedy)
    ask(queue, "greedy")
    assert turns(queue, 6) == "aaaa" + "greedy" + "a"


def test_with_nobody_waiting_the_last_that_left_sets_the_level() -> None:
    queue = vtc()
    ask(queue, "a", 70)
    running = admit(queue)  # a: 70, and nobody waits
    queue.served(running, output_tokens=15)  # a: 100
    ask(queue, "b", 10)
    ask(queue, "b", 10)
    ask(queue, "a", 10)
    assert turns(queue, 3) == "bab"  # both start at 100


def test_the_oldest_request_of_a_tenant_goes_first_and_equal_ages_by_arrival() -> None:
    queue = vtc()
    younger, older = ask(queue, "a", queued=7.0), ask(queue, "a", queued=5.0)
    twin = ask(queue, "a", queued=7.0)
    assert [admit(queue) for _ in range(3)] == [older, younger, twin]


def test_each_priority_is_fair_in_itself() -> None:
    queue = vtc()
    for _ in range(6):
        ask(queue, "a", priority=-1)
        ask(queue, "a")
        ask(queue, "b")
    assert turns(queue, 6) == "aaaaaa"
    assert sorted(turns(queue, 6)) == list("aaabbb")


def test_a_preempted_request_goes_first_and_is_still_charged() -> None:
    queue = vtc()
    for _ in range(4):
        ask(queue, "a")
        ask(queue, "b")
    victim = admit(queue)
    victim.admission = 1
    queue.push_front(victim)
    queue.served(victim, output_tokens=3)  # of a step that was in flight
    assert queue.pop() is victim
    assert turns(queue, 2) == "bb"  # 10 and 20 against 16


def test_a_fork_is_charged_to_its_tenant() -> None:
    queue = vtc()
    for _ in range(4):
        ask(queue, "a")
        ask(queue, "b")
    parent = admit(queue)
    child = make_request("fork", [1], tenant="a")
    queue.served(child, output_tokens=10)  # a: 30
    end(queue, parent)
    queue.served(child, output_tokens=10)  # a: 50
    end(queue, child)
    assert turns(queue, 5) == "bbbba"


def test_a_tenant_whose_fork_still_runs_is_remembered() -> None:
    queue = vtc()
    ask(queue, "a")
    parent = admit(queue)
    child = make_request("fork", [1], tenant="a")
    queue.served(child, output_tokens=1)  # a: 12
    end(queue, parent)
    for _ in range(8):
        ask(queue, "b")
    assert turns(queue, 3) == "bbb"  # b: 42
    queue.served(child, output_tokens=10)  # a: 32
    ask(queue, "a")  # lifted to 42
    assert turns(queue, 2) == "ba"
    end(queue, child)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=40),
    st.lists(st.integers(0, 39), max_size=5),
)
def test_walking_through_is_the_order_of_service(asked: list[tuple[str, int, int]], removed: list[int]) -> None:
    queue = vtc({"c": 3.0})
    requests = [ask(queue, tenant, tokens, priority=priority) for tenant, tokens, priority in asked]
    for index in set(removed):
        if index < len(requests):
            queue.remove(requests[index])
    while (request := queue.peek()) is not None:
        assert next(iter(queue)) is request
        walked = list(queue)
        assert len(walked) == len(queue) and request.request_id in queue
        served = [admit(queue) for _ in range(min(3, len(queue)))]
        assert served == walked[: len(served)]
        queue.served(served[0], output_tokens=1)
    assert len(queue) == 0 and list(queue) == []


def test_tenants_that_came_and_went_are_forgotten() -> None:
    order = VTCOrder(TokenCharges(), {})
    order.push(make_request("stays", [1] * 5, tenant="stays", queued=0.0))
    for index in range(2_000):
        request = make_request(str(index), [1] * 10, tenant=f"passer-by {index}")
        order.push(request)
        if order.peek() is not request:  # one that stays and is served now and then, so that the level rises
            taken = order.pop()
            order.served(taken, 10, 0, 0)
            order.finished(taken)
            order.push(make_request(f"stays {index}", [1] * 5, tenant="stays"))
        if order.peek() is request:
            order.pop()
            order.served(request, 10, 0, 0)
            order.finished(request)
        else:
            order.remove(request)
    assert len(order._clients) < 10
    assert not order.settled
    while order.peek() is not None:
        order.finished(order.pop())
    assert order.settled
