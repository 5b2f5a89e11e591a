"""The waiting queue orders, and forgets what is removed."""

from __future__ import annotations

from dataplane.scheduling.queues import WaitingQueue
from tests.factories.requests import make_request


def drain(queue: WaitingQueue) -> list[str]:
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
    assert len(queue._heap) < 50
    assert drain(queue) == ["0"]
