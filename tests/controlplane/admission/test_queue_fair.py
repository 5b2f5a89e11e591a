"""Gateways' shared queue on a real Valkey: turns across gateways, cancellation, and the time while it is away."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from redis.asyncio import Redis

from controlplane.admission import fair_queue
from controlplane.admission.bands import Band, Lane
from controlplane.admission.dispatch import Waiting
from controlplane.admission.fair_queue import FairQueue, QueueFullError, TurnScript, keys_of
from controlplane.admission.queue import DEAD_S, REAPED
from controlplane.admission.turn_messages import Arrival, Rules, Turn, TurnAnswer
from controlplane.local.valkey import EmbeddedValkey
from controlplane.redis_client import create_redis
from controlplane.settings import Secret
from tests.services import free_port, service_folder

RULES = Rules(slots=4, tokens=10_000, long_slots=1, long_tokens=5_000, long_reserve=0)


def waiting(name: str, tenant: str = "a") -> Waiting:
    return Waiting(
        request_id=name, tenant=tenant, lane=Lane.SHORT, band=Band.STANDARD, deadline_at=5.0,
        uncached=80, cached=20, output=50,
    )  # fmt: skip


@pytest.fixture
async def client(valkey: str, redis: Redis) -> AsyncIterator[Redis]:
    """The product's own client, on an empty Valkey."""
    client = create_redis(Secret(valkey))
    yield client
    await client.aclose()


@asynccontextmanager
async def gateway(redis: Redis, name: str, rules: Rules = RULES, timeout_s: float = 2.0) -> AsyncIterator[FairQueue]:
    queue = FairQueue(redis, "p", name, lambda: rules, timeout_s=timeout_s)
    tasks = [asyncio.create_task(queue.run()), asyncio.create_task(queue.listen())]
    try:
        yield queue
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def state(queue: FairQueue) -> tuple[int, int]:
    last: TurnAnswer | None = queue.last
    return (-1, -1) if last is None else (last.slots, last.waiting)


async def test_a_place_freed_at_one_gateway_goes_to_whose_turn_it_is_at_another(client: Redis) -> None:
    async with gateway(client, "g0") as one, gateway(client, "g1") as other:
        for number in range(4):
            await one.turn_of(waiting(f"r{number}"))
        turn = asyncio.create_task(other.turn_of(waiting("x", "b")))
        await until(lambda: state(other) == (4, 1))
        assert not turn.done()
        one.end("r0")
        async with asyncio.timeout(30):
            grant = await turn
        assert grant.request_id == "x"


async def test_f12_cancelled_at_random_moments_nothing_is_held_in_the_end(client: Redis) -> None:
    rng = random.Random(4)

    async def ask(queue: FairQueue, name: str) -> None:
        await queue.turn_of(waiting(name, rng.choice("abc")))
        try:
            queue.produced(name, 3)
            await asyncio.sleep(rng.uniform(0, 0.01))
        finally:
            queue.end(name)

    async with gateway(client, "g0") as one, gateway(client, "g1") as other:
        tasks = [
            asyncio.create_task(ask(rng.choice((one, other)), f"r{number}")) for number in range(400)
        ]  # fmt: skip
        for task in rng.sample(tasks, 200):
            await asyncio.sleep(rng.uniform(0, 0.002))
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in done)
        assert sum(each is None for each in done) >= 200
        one.wake()
        other.wake()
        await until(lambda: (0, 0) in {state(one), state(other)} and not one.unsent and not other.unsent)
        assert one.turns < 400, "what happens while a call is in the air goes with the next"


async def test_f14_while_valkey_is_away_each_gateway_goes_on_with_its_part_and_returns() -> None:
    with service_folder("valkey") as folder:
        server = EmbeddedValkey(folder / "data", free_port())
        server.start()
        redis = create_redis(Secret(server.url))
        try:
            async with gateway(redis, "g0") as one, gateway(redis, "g1") as other:
                await one.turn_of(waiting("r0"))
                await other.turn_of(waiting("r1"))
                one.wake()
                await until(lambda: one.last is not None and one.last.gateways == 2)
                server.stop()
                async with asyncio.timeout(30):
                    await one.turn_of(waiting("r2"))
                assert one.away
                blocked = asyncio.create_task(one.turn_of(waiting("r3")))
                await until(lambda: state(one) == (2, 1))
                assert not blocked.done(), "two of four slots are its part"
                told = other.turns
                server.start()
                one.wake()
                other.wake()
                async with asyncio.timeout(30):
                    await blocked
                assert not one.away
                await until(lambda: other.turns > told and 4 in {state(one)[0], state(other)[0]})
                for name in ("r0", "r2", "r3"):
                    one.end(name)
                other.end("r1")
                await until(lambda: (0, 0) in {state(one), state(other)})
        finally:
            await redis.aclose()
            with contextlib.suppress(Exception):
                server.stop()


async def test_a_full_queue_is_said_to_whoever_asks(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(client, "g0") as one:
        answer = TurnAnswer(1, 1.0, False, refused=("r",))

        async def full(message: object) -> TurnAnswer:
            return answer

        monkeypatch.setattr(one._script, "turn", full)
        with pytest.raises(QueueFullError):
            await one.turn_of(waiting("r"))


async def test_f5_all_that_fifteen_dead_gateways_held_is_free_after_a_few_turns_in_a_row(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is left need not wait for its own next beat between them."""
    monkeypatch.setattr(fair_queue, "BEAT_S", 3600.0)
    script, rules = TurnScript(client, "p", 5.0), msgspec.structs.replace(RULES, slots=15 * 64, tokens=10**7)
    for dead in range(15):
        held = tuple(
            Arrival(f"d{dead}-{number}", Band.STANDARD, "a", 0, 150, 1.0, held=True) for number in range(REAPED)
        )
        answer = await script.turn(Turn(f"d{dead}", 1, True, rules, held))
    assert (answer.slots, answer.reaping) == (15 * REAPED, False)
    async with gateway(client, "left", rules) as left:
        asked = asyncio.create_task(left.turn_of(waiting("r")))
        await until(lambda: state(left) == (15 * REAPED, 1))
        assert not asked.done()
        for dead in range(15):
            await client.zincrby(keys_of("p")[3], -2 * DEAD_S, f"d{dead}")
        before = left.turns
        left.wake()
        assert (await asked).request_id == "r"
        await until(lambda: state(left) == (1, 0))
        assert left.turns - before <= 15 + 3
        assert left.gateways == 1
        left.end("r")
