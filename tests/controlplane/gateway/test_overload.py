"""More than can be served: what was begun is finished, and a refusal costs next to nothing."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web
from msgspec import structs

from controlplane.quotas.schemas import QuotaKind
from controlplane.settings import Settings
from dataplane.protocol import ReplicaState
from tests.controlplane.gateway.harness import Running, assert_nothing_left, check_error, fleet, route, running_gateway
from tests.controlplane.gateway.metered import limit
from tests.controlplane.gateway.replicas import fake_replica
from tests.controlplane.gateway.test_dispatch import (
    Doors,
    ask,
    drained,
    in_line,
    roomy,
    say,
    small,
    until,
    waiting,
)

__all__ = ["roomy", "small"]

ROUNDS = 60
TIMES_OVER = 4
"""Refusals for each request that is served: five times what there is room for."""


class Lost(Doors):
    """A replica that drops each connection once it is let, before any byte of an answer."""

    async def behave(self, request: web.Request, body: bytes) -> web.StreamResponse:
        door = asyncio.Event()
        self.waiting.append((body.decode(), door))
        await door.wait()
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError


async def test_f24_a_request_that_a_replica_has_worked_on_is_not_shed_for_any_that_waits(small: Settings) -> None:
    """Its replica is lost while more urgent ones fill the line: it goes on in its turn, and stands in no line again."""
    lost, room = Lost(), Doors()
    settings = structs.replace(small, queue_tenant=100)
    async with (
        fake_replica(lost.behave) as bad,
        fake_replica(room.behave) as good,
        running_gateway(settings, route(bad, "r0"), route(good, "r1", ReplicaState.DRAINING)) as served,
    ):
        batch, urgent = served.policy.key(priority=90), served.policy.key(priority=-1)
        begun = asyncio.create_task(ask(served, "begun", key=batch))
        await until(lambda: len(lost.waiting) == 1)
        served.gateway.fleet.adopt(fleet(route(bad, "r0"), route(good, "r1")))
        served.gateway.dispatch.fleet_changed()
        tasks = [asyncio.create_task(ask(served, "fills the pool"))]
        await until(lambda: room.names == ["fills the pool"])
        for place in range(1, 5):
            tasks.append(asyncio.create_task(ask(served, f"urgent {place}", key=urgent)))
            await until(lambda place=place: waiting(served) == place)
        status, _, body = await ask(served, "newcomer", key=batch)
        assert (status, check_error(body, "queue_full")["code"]) == (503, "queue_full"), "no place for its like"
        lost.open(0)
        await until(lambda: room.names == ["fills the pool", "begun"])
        assert waiting(served) == 4
        room.open(1)
        assert (await begun)[0] == 200
        for place in (0, 2, 3, 4, 5):
            await until(lambda place=place: len(room.waiting) > place)
            room.open(place)
        assert {status for status, _, _ in await asyncio.gather(*tasks)} == {200}
        await assert_nothing_left(served)


@contextmanager
def undisturbed() -> Iterator[None]:
    """No collection of garbage in what is measured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def moment(served: Running) -> tuple[float, float]:
    """Seconds that the slowest of the requests took that a full line refused, and those of one that was served at the
    same moment, on a model with room.
    """

    async def timed(model: str, status: int) -> float:
        begun = time.perf_counter()
        async with served.post({**say("x"), "model": model}) as response:
            await response.read()
            assert response.status == status
        return time.perf_counter() - begun

    taken, *refused = await asyncio.gather(timed("spare", 200), *(timed("m", 503) for _ in range(TIMES_OVER)))
    return max(refused), taken


async def test_f24_five_times_over_refusals_come_before_what_is_served(
    small: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what they cost is judged the same refusals' price when a lease is taken and given back for each, as it
    would be if the line were looked at only after the quotas.
    """
    room = Doors()
    async with (
        fake_replica(room.behave) as full,
        fake_replica() as spare,
        running_gateway(
            small,
            route(full, "r0"),
            structs.replace(route(spare, "r1"), pool="pool-spare"),
            models=("m", "spare"),
            limits=(limit(QuotaKind.REQUESTS_PER_MINUTE, 1_000_000), limit(QuotaKind.TOKENS_PER_DAY, 10**9)),
        ) as served,
    ):
        tasks = await in_line(served, room, [("1", {}), ("2", {}), ("3", {})])
        parts, control = [], []
        with undisturbed():
            for _ in range(ROUNDS):
                parts.append(await moment(served))
                with monkeypatch.context() as patched:
                    patched.setattr(served.gateway.dispatch, "turn_away", lambda *_: None)
                    control.append(await moment(served))
        before = sum(refused < taken for refused, taken in parts)
        assert before >= 0.95 * ROUNDS, parts
        cheap, dear = (statistics.median(refused for refused, _ in times) for times in (parts, control))
        assert cheap < 0.95 * dear, (cheap, dear)
        await drained(room, tasks)
        await assert_nothing_left(served)
