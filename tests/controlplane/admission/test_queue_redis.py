"""The queue inside Redis is the pure one, step by step, whoever calls and however many at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.msgpack import decode
from redis.asyncio import Redis

from controlplane.admission.dispatch import Dispatcher
from controlplane.admission.fair_queue import TurnScript, keys_of
from controlplane.admission.queue import DEAD_S, IDLE_S, SharedQueue
from controlplane.admission.turn_messages import Turn, TurnAnswer
from dataplane.scheduling.vtc import TokenCharges
from tests.controlplane.admission.messages import RULES, Chatter
from tests.controlplane.admission.test_dispatch import waiting

META, SERVED, REQUESTS, GATEWAYS, QUEUE, OWNED, UNSEEN, HELD, IDLE = keys_of("p")[:9]


async def stored(redis: Redis) -> dict[tuple[int, str], float]:
    """Everybody's virtual service in Redis."""
    found = await redis.hgetall(SERVED)
    return {(int(member[:1]), member[1:].decode()): float(value) for member, value in found.items()}


async def age(redis: Redis, queue: SharedQueue, rng: random.Random) -> None:
    """Let a gateway seem silent, or what is idle seem so for long, in both."""
    if rng.random() < 0.5:
        name = rng.choice(["g0#1", "g1#1", "g2#1"])
        if await redis.zscore(GATEWAYS, name) is not None:
            queue._heard[name] = await redis.zincrby(GATEWAYS, -2 * DEAD_S, name)
        return
    for member in await redis.zrange(IDLE, 0, -1):
        since = await redis.zincrby(IDLE, -2 * IDLE_S, member)
        queue._idle[int(member[:1]), member[1:].decode()] = since


@pytest.mark.parametrize("seed", range(6))
async def test_the_script_answers_as_the_pure_queue_does(redis: Redis, seed: int) -> None:
    rng = random.Random(seed)
    script, queue = TurnScript(redis, "p", 5.0), SharedQueue()
    gateways = [Chatter(f"g{index}#1", rng) for index in range(3)]
    granted = lost = 0
    for step in range(400):
        if rng.random() < 0.03:
            await age(redis, queue, rng)
        gateway = rng.choice(gateways)
        message = gateway.message()
        answer = await script.turn(message)
        assert answer == queue.turn(message, answer.at), step
        gateway.answered(answer)
        granted += len(answer.grants)
        lost += answer.lost
        if step % 20 == 0:
            assert await stored(redis) == queue.counters()
    assert await stored(redis) == queue.counters()
    assert granted > 100
    assert lost


@pytest.mark.parametrize("slots", [0, 2, 9, 1_000])
async def test_f12_the_script_takes_over_what_is_told_anew_as_the_pure_queue_does(redis: Redis, slots: int) -> None:
    rng = random.Random(slots)
    rules = msgspec.structs.replace(RULES, slots=slots)
    script, queue = TurnScript(redis, "p", 5.0), SharedQueue()
    gateways = [Chatter(f"g{index}#1", rng, rules) for index in range(2)]
    for step in range(300):
        gateway = rng.choice(gateways)
        message = gateway.message()
        if rng.random() < 0.1:
            gateway.name = f"{gateway.name[:2]}#{step}"
            arrivals = tuple(
                msgspec.structs.replace(arrival, held=arrival.held or name in gateway.granted)
                for name, arrival in gateway.known.items()
            )
            gateway.number += 1
            message = gateway.last = Turn(gateway.name, gateway.number, True, rules, arrivals[: rng.randint(1, 200)])
        answer = await script.turn(message)
        assert answer == queue.turn(message, answer.at), step
        gateway.answered(answer)
        if step % 10 == 0:
            assert await stored(redis) == queue.counters()


@pytest.mark.parametrize("slots", [0, 2, 1_000])
async def test_it_answers_so_too_where_there_is_always_or_never_room(redis: Redis, slots: int) -> None:
    rng = random.Random(slots)
    rules = msgspec.structs.replace(RULES, slots=slots, tokens=10**6, long_slots=50, long_tokens=10**5)
    script, queue = TurnScript(redis, "p", 5.0), SharedQueue()
    gateways = [Chatter(f"g{index}#1", rng, rules) for index in range(2)]
    granted = 0
    for step in range(300):
        gateway = rng.choice(gateways)
        message = gateway.message()
        answer = await script.turn(message)
        assert answer == queue.turn(message, answer.at), step
        gateway.answered(answer)
        granted += len(answer.grants)
        if step % 10 == 0:
            assert await stored(redis) == queue.counters()
    assert bool(granted) == bool(slots)


async def test_when_everything_ended_nothing_is_left_but_what_tenants_were_served(redis: Redis) -> None:
    rng = random.Random(1)
    script = TurnScript(redis, "p", 5.0)
    gateway = Chatter("g#1", rng)
    for _ in range(100):
        gateway.answered(await script.turn(gateway.message()))
    gateway.number += 1
    answer = await script.turn(Turn("g#1", gateway.number, False, gateway.rules, ended=tuple(gateway.known)))
    assert (answer.waiting, answer.slots, answer.tokens, answer.grants) == (0, 0, 0, ())
    left = {key.decode() for key in await redis.keys()}
    assert left <= {META, SERVED, GATEWAYS, IDLE}
    assert {await redis.ttl(key) > 0 for key in (META, GATEWAYS)} == {True}


async def test_a_queue_that_lost_its_counts_is_told_anew(redis: Redis) -> None:
    """The keys expire and are evicted one by one: what is left must not be counted from nothing."""
    script, rules = TurnScript(redis, "p", 5.0), msgspec.structs.replace(RULES, slots=1)
    dispatcher = Dispatcher("g", TokenCharges())
    for name in ("runs", "waits"):
        dispatcher.add(waiting(name))
    dispatcher.answered(await script.turn(dispatcher.message(rules)))
    await redis.delete(META)
    answer = await script.turn(dispatcher.message(rules))
    assert answer.lost
    dispatcher.answered(answer)
    answer = await script.turn(dispatcher.message(rules))
    assert (answer.slots, answer.waiting) == (1, 1)
    dispatcher.answered(answer)
    dispatcher.end("runs")
    grants = dispatcher.answered(await script.turn(dispatcher.message(rules))).grants
    assert [grant.request_id for grant in grants] == ["waits"]
    dispatcher.end("waits")
    answer = await script.turn(dispatcher.message(rules))
    assert (answer.slots, answer.waiting, answer.tokens) == (0, 0, 0)


TALKER = """
import asyncio, json, random, sys
import msgspec
from redis.asyncio import Redis
from controlplane.admission.dispatch import Dispatcher
from controlplane.admission.fair_queue import TurnScript
from tests.controlplane.admission.messages import RULES, Chatter

async def main(url, name, turns):
    redis = Redis.from_url(url)
    script, gateway = TurnScript(redis, "p", 20.0), Chatter(name, random.Random(name))
    for _ in range(turns):
        message = gateway.message()
        answer = await script.turn(message)
        gateway.answered(answer)
        print(json.dumps([msgspec.msgpack.encode(message).hex(), msgspec.msgpack.encode(answer).hex()]))
    await redis.aclose()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


async def test_four_processes_at_once_keep_the_counters_of_the_pure_queue(redis: Redis, valkey: str) -> None:
    turns = 250
    talkers = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", TALKER, valkey, f"g{index}#1", str(turns),
            stdout=subprocess.PIPE, cwd=Path(__file__).parents[3],
        )
        for index in range(4)
    ]  # fmt: skip
    said = [(await talker.communicate())[0].decode().splitlines() for talker in talkers]
    assert [len(lines) for lines in said] == [turns] * 4
    exchanges = [
        (decode(bytes.fromhex(sent), type=Turn), decode(bytes.fromhex(got), type=TurnAnswer))
        for lines in said
        for sent, got in map(json.loads, lines)
    ]
    exchanges.sort(key=lambda pair: pair[1].sequence)
    assert [answer.sequence for _, answer in exchanges] == list(range(1, 4 * turns + 1))
    order = [message.gateway for message, _ in exchanges]
    assert sum(one != other for one, other in itertools.pairwise(order)) > turns / 4, "they did not overlap"
    queue = SharedQueue()
    for message, answer in exchanges:
        assert queue.turn(message, answer.at) == answer
    assert await stored(redis) == queue.counters()
