"""What a gateway says of a request's place is what the engine's queue orders by."""

from __future__ import annotations

from dataplane.caller import Caller
from dataplane.protocol import HEADER_FAIR_TAG, HEADER_PRIORITY
from dataplane.scheduling.config import QueueOrder, SchedulerConfig
from dataplane.scheduling.queues import make_queue
from tests.factories.requests import make_request


def test_the_headers_priority_goes_first_and_then_the_least_served() -> None:
    told = {"batch": ("50", 1.0), "much": ("0", 1234.0000000000002), "less": ("0", 1234.0), "urgent": ("-5", 9e9)}
    queue = make_queue(SchedulerConfig(order=QueueOrder.FAIR_TAG))
    for at, (name, (priority, tag)) in enumerate(told.items()):
        caller = Caller.from_headers({HEADER_PRIORITY: priority, HEADER_FAIR_TAG: repr(tag)})
        assert caller.fair_tag == tag
        queue.push(make_request(name, [1], queued=float(at), priority=caller.priority, fair_tag=caller.fair_tag))
    order = [queue.pop().request_id for _ in range(len(queue))]
    assert order == ["urgent", "less", "much", "batch"]
