"""The waiting queue orders, and forgets what is removed."""

from __future__ import annotations

import pytest

from dataplane.scheduling.config import QueueOrder, SchedulerConfig
from dataplane.scheduling.queues import Queue, WaitingQueue, make_queue
from tests.factories.requests import make_request


def drain(queue: Queue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_first_come_first_served_when_priority_and_tag_are_equal() -> None:
    queue = WaitingQueue()
    for name in "dacb":
        queue.push(make_request(name, [1], queued=5.0))
    assert [request.request_id for request in queue] == list("dacb")
    assert drain(queue) == list("dacb")
    assert queue.peek() is None


def test_preempted_requests_stand_in_front_of_their_band_by_first_admission() -> None:
    queue = WaitingQueue()
    queue.push(make_request("new", [1], fair_tag=-5.0))
    queue.push(make_request("urgent", [1], priority=-1))
    queue.push_front(make_request("younger", [1], admission=7))
    queue.push_front(make_request("older", [1], admission=3))
    assert drain(queue) == ["urgent", "older", "younger", "new"]


def test_removal_leaves_no_trace_however_many() -> None:
    queue = WaitingQueue()
    requests = [make_request(str(index), [1]) for index in range(500)]
    for request in requests:
        queue.push(request)
    for request in requests[1:]:
        queue.remove(request)
    assert "7" not in queue
    assert "0" in queue
    assert len(queue._bands[0].order._requests._entries) < 50
    assert drain(queue) == ["0"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [(QueueOrder.FCFS, ["late tag", "early tag"]), (QueueOrder.FAIR_TAG, ["early tag", "late tag"])],
)
def test_the_tag_counts_where_the_configuration_says_so(order: QueueOrder, expected: list[str]) -> None:
    queue = make_queue(SchedulerConfig(order=order))
    queue.push(make_request("late tag", [1], queued=1.0, fair_tag=9.0))
    queue.push(make_request("early tag", [1], queued=2.0, fair_tag=3.0))
    assert drain(queue) == expected


def test_walking_through_goes_in_the_order_of_service_and_notices_a_change() -> None:
    queue = WaitingQueue()
    for index in range(50):
        queue.push(make_request(str(index), [1], priority=index % 3, fair_tag=float(index * 37 % 50)))
    queue.push_front(make_request("back", [1], priority=1, admission=4))
    for index in range(0, 50, 7):
        queue.remove(next(request for request in queue if request.request_id == str(index)))
    walked = [request.request_id for request in queue]
    with pytest.raises(RuntimeError):
        for request in queue:
            queue.remove(request)
    assert drain(queue) == walked[1:]


def test_a_request_may_come_back_after_it_was_taken_out() -> None:
    queue = WaitingQueue()
    request = make_request("a", [1])
    queue.push(request)
    assert queue.pop() is request
    assert len(queue) == 0 and "a" not in queue and queue.peek() is None
    queue.push_front(request)
    queue.push(make_request("b", [1]))
    assert queue.peek() is request
    queue.remove(request)
    assert drain(queue) == ["b"]
