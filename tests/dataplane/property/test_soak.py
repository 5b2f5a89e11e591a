"""Ten thousand requests through tiny pools: every block comes back, and memory does not grow with what was served."""

from __future__ import annotations

import gc
import random
from collections import deque

import pytest

from dataplane.hardware.device import resident_memory
from dataplane.scheduling.config import Preemption
from dataplane.scheduling.plan import Plan, StepResult
from dataplane.scheduling.scheduler import Scheduler
from tests.factories.processes import in_a_fresh_process
from tests.factories.requests import ScriptedExecutor, make_request, make_scheduler

REQUESTS = 10_000
WARM = 2_000
EOS = 0


def arrive(scheduler: Scheduler, draw: random.Random, name: str) -> None:
    scheduler.add(
        make_request(
            name,
            [7] * draw.randint(0, 12) + draw.choices(range(1, 4), k=draw.randint(1, 20)),
            max_tokens=draw.randint(1, 12),
            tenant=draw.choice(("acme", "beta", "gamma")),
            priority=draw.choice((0, 0, 1)),
            forks=(f"{name}.1", f"{name}.2") if draw.random() < 0.1 else (),
            queued=float(name),
        )
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_nothing_is_left_and_memory_is_flat(steps_in_flight: int) -> None:
    in_a_fresh_process(soak, steps_in_flight)


def soak(steps_in_flight: int) -> None:
    scheduler = make_scheduler(
        num_blocks=41,
        block_size=4,
        host_blocks=16,
        eos=[EOS],
        max_num_seqs=8,
        max_num_batched_tokens=32,
        preemption=Preemption.SWAP,
        steps_in_flight=steps_in_flight,
    )
    draw = random.Random(steps_in_flight)
    executor = ScriptedExecutor(lambda _, position: draw.randint(0, 15))
    flights: deque[tuple[Plan, StepResult]] = deque()
    sent, ended, warm = 0, 0, 0
    while scheduler.has_work() or sent < REQUESTS:
        while sent < REQUESTS and len(scheduler.waiting) < 20:
            arrive(scheduler, draw, str(sent))
            sent += 1
        if draw.random() < 0.02:
            victim = draw.choice(list(scheduler._requests))
            ended += sum(output.finish is not None for output in scheduler.abort([victim], float(sent)))
        while len(flights) < steps_in_flight:
            plan = scheduler.plan(float(sent))
            if plan.tokens or plan.told:
                flights.append((plan, executor.run(plan)))
            if not plan.tokens:
                break
        if flights:
            ended += sum(output.finish is not None for output in scheduler.commit(*flights.popleft(), float(sent)))
        if sent >= WARM and not warm:
            gc.collect()
            warm = resident_memory()
    gc.collect()
    scheduler.check_integrity()
    assert ended >= REQUESTS
    assert scheduler.accounts.scheduling.preemptions["swap"] > 0
    assert scheduler.kv.free_blocks == 40
    assert scheduler.kv.host.used == 0
    assert resident_memory() - warm < 8 * 2**20
