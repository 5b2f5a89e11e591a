"""What a step costs while thousands wait, counted in lines run and keys compared: time would say less.

A line of ours that walks over all that wait shows in the lines; a sort or a heapify shows in the comparisons.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from dataplane.request import Request, RequestState
from dataplane.scheduling import queues
from dataplane.scheduling.cache_order import LOOKS
from dataplane.scheduling.config import Batching, QueueOrder, SchedulerConfig
from dataplane.scheduling.queues import Queue, make_queue
from tests.factories.requests import ScriptedExecutor, make_request, make_scheduler

OURS = queues.__file__.removesuffix("scheduling/queues.py")
FEW, MANY = 100, 10_000
RUNNING = 8


def counted(operations: Operations) -> type[float]:
    class Counted(float):
        def __lt__(self, other: float) -> bool:
            operations.count += 1
            return float.__lt__(self, other)

        def __eq__(self, other: object) -> bool:
            operations.count += 1
            return float.__eq__(self, other)

        __hash__ = float.__hash__

    return Counted


class Operations:
    """Lines of the engine run and keys compared while `counting`."""

    def __init__(self) -> None:
        self.count = 0
        self.number = counted(self)
        """A number that adds to the count when it is compared."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        self.count += event == "line"
        return self._line


class Busy:
    """A queue in use: in each step one request is admitted, one arrives, one leaves, and `RUNNING` get a token."""

    def __init__(self, order: QueueOrder, waiting: int) -> None:
        self.operations = Operations()
        self.rated = 0
        self.queue: Queue = make_queue(SchedulerConfig(order=order), hit_ratio=self._ratio)
        self._draw = random.Random(waiting)
        self._running: deque[Request] = deque()
        self._waiting: list[Request] = []
        self._count = 0
        for _ in range(waiting):
            self._push()

    def _ratio(self, request: Request) -> float:
        self.rated += 1
        return self._draw.random()

    def _push(self) -> None:
        self._count += 1
        request = make_request(
            str(self._count),
            [1] * 8,
            tenant=f"tenant {self._count // 3}",
            queued=self.operations.number(self._count),
            fair_tag=self.operations.number(self._draw.random()),
        )
        self._waiting.append(request)
        self.queue.push(request)

    def _leave(self) -> None:
        """Somebody gives up waiting."""
        while True:
            index = self._draw.randrange(len(self._waiting))
            self._waiting[index], self._waiting[-1] = self._waiting[-1], self._waiting[index]
            request = self._waiting.pop()
            if request.request_id in self.queue:
                break
        self.queue.remove(request)
        request.state = RequestState.FINISHED_ABORTED
        self.queue.finished(request)

    def step(self) -> None:
        for _ in range(4):  # one is let in; the next finds no room, step after step
            self.queue.peek(float(self._count))
        request = self.queue.pop()
        self.queue.served(request, input_tokens=8)
        self._running.append(request)
        for running in self._running:
            self.queue.served(running, output_tokens=1)
        if len(self._running) == RUNNING:
            done = self._running.popleft()
            done.state = RequestState.FINISHED_LENGTH
            self.queue.finished(done)
        self._push()
        self._push()
        self._leave()

    def cost(self, steps: int) -> float:
        """Operations a step."""
        before = self.operations.count
        with self.operations.counting():
            for _ in range(steps):
                self.step()
        return (self.operations.count - before) / steps


@pytest.mark.parametrize("order", QueueOrder)
def test_a_step_costs_no_more_than_the_logarithm_of_those_that_wait(order: QueueOrder) -> None:
    few = Busy(order, FEW).cost(500)
    many = Busy(order, MANY).cost(500)
    assert many < 2 * few, f"{few:.0f} operations a step with {FEW} waiting, {many:.0f} with {MANY}"


@pytest.mark.parametrize("order", QueueOrder)
def test_a_step_costs_the_same_after_any_history(order: QueueOrder) -> None:
    busy = Busy(order, 300)
    fresh = busy.cost(500)
    for _ in range(3_000):
        busy.step()
    assert busy.cost(500) < 1.1 * fresh


def test_the_prefix_cache_is_asked_about_a_few_requests_a_step() -> None:
    busy = Busy(QueueOrder.CACHE_AWARE, MANY)
    assert busy.rated == MANY
    for _ in range(100):
        busy.step()
    assert busy.rated <= MANY + 100 * (2 + LOOKS)  # two arrive in a step


@pytest.mark.parametrize("order", [QueueOrder.FCFS, QueueOrder.FAIR_TAG, QueueOrder.VTC])
def test_the_scheduler_plans_a_step_as_cheaply_while_ten_thousand_wait(order: QueueOrder) -> None:
    costs = []
    for waiting in (FEW, MANY):
        operations = Operations()
        scheduler = make_scheduler(num_blocks=41, max_waiting=MANY + 10, caching=False, order=order)
        executor = ScriptedExecutor(lambda request_id, position: 7)
        for index in range(waiting):
            request = make_request(str(index), [1] * 40, max_tokens=100, tenant=str(index % 97))
            request.queued = operations.number(index)
            scheduler.add(request)
        cost = []
        for step in range(60):
            before = operations.count
            with operations.counting():
                plan = scheduler.plan(float(step))
                scheduler.commit(plan, executor.run(plan), float(step))
            cost.append(operations.count - before)
        assert scheduler.running and len(scheduler.waiting) > waiting - 40
        costs.append(cost)
    few, many = costs
    assert sorted(few)[30] == sorted(many)[30]  # nobody comes or goes: the queue is only looked at
    assert sum(many) < 1.2 * sum(few)


def selective_step(order: QueueOrder, others: int) -> tuple[int, int]:
    """Operations of a selective step that admits one who is the queue's head and 49 like it at the queue's end, with
    `others` between them; and those of a walk through the whole queue before."""
    operations = Operations()
    scheduler = make_scheduler(
        max_waiting=MANY, caching=False, order=order, batching=Batching.SELECTIVE, bucket_ageing_s=0.0
    )
    for index in range(others + 50):
        queued = operations.number(index)
        scheduler.add(make_request(str(index), [1] * (40 if 1 <= index <= others else 4), queued=queued))
    with operations.counting():
        assert sum(1 for _ in scheduler.waiting) == others + 50
    walk = operations.count
    with operations.counting():
        plan = scheduler.plan(float(MANY))
    assert len(plan.tokens) == 50
    return operations.count - walk, walk


@pytest.mark.parametrize("order", [QueueOrder.FCFS, QueueOrder.FAIR_TAG])
def test_a_selective_step_costs_the_same_however_many_wait_before_its_bucket(order: QueueOrder) -> None:
    few, many = (selective_step(order, others)[0] for others in (FEW, MANY // 5))
    assert many < 1.2 * few, f"{few} operations with {FEW} others, {many} with {MANY // 5}"


@pytest.mark.parametrize("order", [QueueOrder.VTC, QueueOrder.CACHE_AWARE])
def test_a_selective_step_walks_through_the_queue_twice_at_most(order: QueueOrder) -> None:
    few, few_walk = selective_step(order, FEW)
    many, walk = selective_step(order, MANY // 5)
    assert many < 1.2 * few + 2.5 * (walk - few_walk), f"{few} and {many} operations, {walk} for a walk"
