"""The fleet service and its watcher on real Postgres."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import asyncpg
import msgspec
import pytest
from redis.asyncio import Redis
from sqlalchemy import event, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from controlplane.db import POLICY_CHANNEL, transaction
from controlplane.errors import InvalidRequestError, NotFoundError
from controlplane.fleet import service
from controlplane.fleet.live import LoadPublisher
from controlplane.fleet.liveness import Limits
from controlplane.fleet.models import ReplicaEvent
from controlplane.fleet.schemas import LOAD_CHANNEL, PoolPatch, ReplicaLoad
from controlplane.fleet.watcher import Watcher
from dataplane.protocol import Gauges, ReplicaState
from tests.controlplane.telemetry.reports import BOOT, MODEL, POOL, report

LIMITS = Limits(stale_after_s=5.0, lost_after_s=15.0)
NOW = 1_700_000_000.0


async def silent_for(engine: AsyncEngine, seconds: float, replica: str = "r1") -> None:
    """Move the replica's last report into the past."""
    async with transaction(engine) as session:
        await session.execute(
            text("UPDATE replicas SET last_report_at = now() - make_interval(secs => :s) WHERE id = :id"),
            {"s": seconds, "id": replica},
        )


def old_watcher(engine: AsyncEngine) -> Watcher:
    """A watcher that has been listening for long."""
    watcher = Watcher(engine, LIMITS)
    watcher._listening_since = 0.0
    return watcher


async def states(engine: AsyncEngine) -> dict[str, ReplicaState]:
    async with transaction(engine) as session:
        return {route.replica: route.state for route in (await service.load_fleet(session)).replicas}


async def events_of(engine: AsyncEngine, kind: str) -> list[ReplicaEvent]:
    async with transaction(engine) as session:
        query = select(ReplicaEvent).where(ReplicaEvent.kind == kind).order_by(ReplicaEvent.id)
        return list(await session.scalars(query))


async def register(engine: AsyncEngine, *reports: object) -> service.Intake:
    async with transaction(engine) as session:
        await service.ensure_pool(session, POOL, MODEL)
        return await service.take_in(session, list(reports), NOW)  # type: ignore[arg-type]


async def test_a_replica_appears_with_its_first_report_and_only_in_a_known_pool(session: AsyncSession) -> None:
    await service.ensure_pool(session, POOL, MODEL)
    intake = await service.take_in(session, [report("r1"), report("r2", pool="nowhere")], NOW)
    assert [one.refused for one in intake.registrations] == ["", "pool 'nowhere' is not known"]
    fleet = await service.load_fleet(session)
    assert [(one.replica, one.pool, one.state, one.boot_epoch) for one in fleet.replicas] == [
        ("r1", POOL, ReplicaState.READY, BOOT)
    ]
    assert [(pool.name, pool.model, pool.backend) for pool in fleet.pools] == [(POOL, MODEL, "native")]


async def test_two_who_size_a_pool_at_once_do_not_undo_each_other(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        await service.ensure_pool(session, POOL, MODEL)

    async def size(patch: PoolPatch) -> None:
        async with transaction(committed_engine) as session:
            await service.set_pool_size(session, POOL, patch)

    async with transaction(committed_engine) as session:
        await service.set_pool_size(session, POOL, PoolPatch(replica_slots=16))
        other = asyncio.create_task(size(PoolPatch(replica_tokens=4096)))
        done, _ = await asyncio.wait({other}, timeout=0.5)
        assert not done, "it waits for the first"
    await other
    async with transaction(committed_engine) as session:
        (pool,) = await service.list_pools(session)
    assert (pool.replica_slots, pool.replica_tokens) == (16, 4096)


async def test_f28_an_older_boot_or_sequence_never_overwrites(session: AsyncSession) -> None:
    await service.ensure_pool(session, POOL, MODEL)
    newest = report(sequence=7, boot_epoch=BOOT + 1, url="http://127.0.0.1:9")
    await service.take_in(session, [newest], NOW)
    for old in (
        report(sequence=99, state=ReplicaState.FAILED),
        report(sequence=6, boot_epoch=BOOT + 1, state=ReplicaState.FAILED),
        report(sequence=7, boot_epoch=BOOT + 1, state=ReplicaState.FAILED),
    ):
        intake = await service.take_in(session, [old], NOW)
        assert intake.loads == [], "an old report's load is not published"
    (route,) = (await service.load_fleet(session)).replicas
    assert (route.state, route.url, route.boot_epoch) == (ReplicaState.READY, "http://127.0.0.1:9", BOOT + 1)


@pytest.mark.parametrize("second_sequence", [3, 9])
async def test_two_control_planes_that_hear_of_a_replica_at_once_register_it_once(
    committed_engine: AsyncEngine, second_sequence: int
) -> None:
    async with transaction(committed_engine) as session:
        await service.ensure_pool(session, POOL, MODEL)

    async def second() -> None:
        async with transaction(committed_engine) as session:
            await service.take_in(session, [report(sequence=second_sequence)], NOW)

    async with transaction(committed_engine) as session:
        await service.take_in(session, [report(sequence=5)], NOW)
        waiting = asyncio.create_task(second())
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done(), "the second has seen no row and now waits for the first to commit"
    await waiting
    async with transaction(committed_engine) as session:
        facts = (await service.repository.lock_replicas(session, ["r1"]))["r1"]
    assert facts.sequence == max(5, second_sequence)
    assert len(await events_of(committed_engine, "registered")) == 1


async def test_several_reports_of_one_replica_in_a_batch_end_at_the_newest(session: AsyncSession) -> None:
    await service.ensure_pool(session, POOL, MODEL)
    batch = [
        report(sequence=3, state=ReplicaState.DRAINING),
        report(sequence=1, state=ReplicaState.STARTING),
        report(sequence=2),
    ]
    intake = await service.take_in(session, batch, NOW)
    assert [load.state for load in intake.loads] == [ReplicaState.DRAINING]
    (route,) = (await service.load_fleet(session)).replicas
    assert route.state is ReplicaState.DRAINING


async def test_taking_in_a_thousand_replicas_costs_a_handful_of_statements(session: AsyncSession) -> None:
    await service.ensure_pool(session, POOL, MODEL)
    statements: list[str] = []

    def record(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    connection = (await session.connection()).sync_connection
    event.listen(connection, "before_cursor_execute", record)
    await service.take_in(session, [report(f"r{n}") for n in range(1000)], NOW)
    event.remove(connection, "before_cursor_execute", record)
    assert len(statements) <= 6
    assert len((await service.load_fleet(session)).replicas) == 1000


async def test_f19_silence_is_concluded_and_the_next_report_undoes_it(committed_engine: AsyncEngine) -> None:
    await register(committed_engine, report(sequence=1))
    watcher = old_watcher(committed_engine)
    await watcher.look()
    assert await states(committed_engine) == {"r1": ReplicaState.READY}
    for seconds, expected in ((6, ReplicaState.STALE), (16, ReplicaState.LOST)):
        await silent_for(committed_engine, seconds)
        await watcher.look()
        assert await states(committed_engine) == {"r1": expected}
    await register(committed_engine, report(sequence=2))
    assert await states(committed_engine) == {"r1": ReplicaState.READY}
    moves = [(one.before, one.after) for one in await events_of(committed_engine, "state")]
    assert moves == [("ready", "stale"), ("stale", "lost"), ("lost", "ready")]


async def test_f35_many_control_planes_make_one_transition_and_one_event(committed_engine: AsyncEngine) -> None:
    names = [f"r{n}" for n in range(20)]
    await register(committed_engine, *(report(name) for name in names))
    for name in names:
        await silent_for(committed_engine, 6, name)
    await asyncio.gather(*(old_watcher(committed_engine).look() for _ in range(6)))
    counted = Counter(one.replica for one in await events_of(committed_engine, "state"))
    assert counted == dict.fromkeys(names, 1)


async def test_f19_after_a_restart_or_an_outage_silence_counts_from_then(committed_engine: AsyncEngine) -> None:
    await register(committed_engine, report())
    await silent_for(committed_engine, 3600)
    fresh = Watcher(committed_engine, LIMITS)
    pause_s = await fresh.look()
    assert await states(committed_engine) == {"r1": ReplicaState.READY}
    assert pause_s <= LIMITS.stale_after_s
    old = old_watcher(committed_engine)
    old.deafen()
    await old.look()
    assert await states(committed_engine) == {"r1": ReplicaState.READY}


async def test_a_replica_that_reports_while_it_is_judged_keeps_its_word(committed_engine: AsyncEngine) -> None:
    await register(committed_engine, report(sequence=1))
    async with transaction(committed_engine) as session:
        facts = (await service.repository.lock_replicas(session, ["r1"]))["r1"]
    await register(committed_engine, report(sequence=2))
    async with transaction(committed_engine) as session:
        assert not await service._transition(session, facts, ReplicaState.STALE, "too late")
    assert await states(committed_engine) == {"r1": ReplicaState.READY}


async def test_the_running_watcher_marks_silent_replicas_by_itself(committed_engine: AsyncEngine) -> None:
    await register(committed_engine, report())
    watcher = Watcher(committed_engine, Limits(stale_after_s=0.2, lost_after_s=0.4))
    running = asyncio.create_task(watcher.run())
    try:
        async with asyncio.timeout(30):
            while (await states(committed_engine))["r1"] is not ReplicaState.LOST:
                await asyncio.sleep(0.05)
    finally:
        running.cancel()
    moves = [(one.before, one.after) for one in await events_of(committed_engine, "state")]
    assert moves[-1][1] == "lost" and len(moves) <= 2


async def test_f15_the_watcher_outlives_an_outage_and_begins_to_listen_anew() -> None:
    nowhere = create_async_engine("postgresql+asyncpg://nobody:nothing@127.0.0.1:1/none")
    watcher = old_watcher(nowhere)
    running = asyncio.create_task(watcher.run())
    async with asyncio.timeout(30):
        while watcher._listening_since is not None:
            await asyncio.sleep(0.02)
    assert not running.done()
    running.cancel()
    await nowhere.dispose()


async def test_gateways_hear_of_state_changes_but_not_of_each_report(
    committed_engine: AsyncEngine, committed_database: str
) -> None:
    heard: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    listener = await asyncpg.connect(committed_database)
    await listener.add_listener(POLICY_CHANNEL, lambda *found: heard.put_nowait(json.loads(found[3])))
    await register(committed_engine, report(sequence=1))
    for sequence in range(2, 6):
        await register(committed_engine, report(sequence=sequence, gauges=Gauges(running=sequence)))
    await register(committed_engine, report(sequence=6, state=ReplicaState.DRAINING))
    expected = [("pools", POOL), ("replicas", "r1"), ("replicas", "r1")]
    found = [await asyncio.wait_for(heard.get(), 20) for _ in expected]
    await listener.execute("SELECT 1")
    assert [(one["table"], one["id"]) for one in found] == expected
    assert heard.empty()
    async with transaction(committed_engine) as session:
        assert (await service.load_fleet(session)).epoch == found[-1]["epoch"]
    await listener.close()


async def test_draining_shows_at_once_reaches_the_replica_and_outlives_its_restart(session: AsyncSession) -> None:
    await service.ensure_pool(session, POOL, MODEL)
    await service.take_in(session, [report(sequence=1)], NOW)
    assert await service.set_drain(session, "r1", True, reason="maintenance") is ReplicaState.DRAINING
    assert await service.set_drain(session, "r1", True, reason="again") is ReplicaState.DRAINING
    intake = await service.take_in(session, [report(sequence=2)], NOW)
    assert [one.kind for one in intake.registrations[0].commands] == ["drain"]
    intake = await service.take_in(session, [report(sequence=1, boot_epoch=BOOT + 1)], NOW)
    assert [one.kind for one in intake.registrations[0].commands] == ["drain"]
    (route,) = (await service.load_fleet(session)).replicas
    assert route.state is ReplicaState.DRAINING
    await service.set_drain(session, "r1", False, reason="done")
    draining = report(sequence=2, boot_epoch=BOOT + 1, state=ReplicaState.DRAINING)
    intake = await service.take_in(session, [draining], NOW)
    assert [one.kind for one in intake.registrations[0].commands] == ["resume"]
    intake = await service.take_in(session, [report(sequence=3, boot_epoch=BOOT + 1)], NOW)
    assert intake.registrations[0].commands == []
    (route,) = (await service.load_fleet(session)).replicas
    assert route.state is ReplicaState.READY


async def test_draining_an_unknown_replica_is_refused(session: AsyncSession) -> None:
    with pytest.raises(NotFoundError, match="no replica nobody"):
        await service.set_drain(session, "nobody", True, reason="test")


async def test_ensure_pool_repeats_quietly_and_checks_names(session: AsyncSession) -> None:
    first = await service.ensure_pool(session, POOL, MODEL)
    epoch = (await service.load_fleet(session)).epoch
    assert await service.ensure_pool(session, POOL, MODEL) == first
    assert (await service.load_fleet(session)).epoch == epoch
    assert (await service.ensure_pool(session, POOL, "other")).model == "other"
    for bad in ({"name": "Pool One"}, {"model": ""}, {"backend": "carrier-pigeon"}):
        with pytest.raises(InvalidRequestError):
            await service.ensure_pool(session, **{"name": POOL, "model": MODEL, **bad})


async def test_pages_see_live_gauges_and_age(session: AsyncSession, redis: Redis) -> None:
    await service.ensure_pool(session, POOL, MODEL)
    gauges = Gauges(running=3, waiting=2, blocks_total=10, blocks_used=4)
    intake = await service.take_in(session, [report(gauges=gauges)], NOW)
    subscription = redis.pubsub()
    await subscription.subscribe(LOAD_CHANNEL)
    publisher = LoadPublisher(redis)
    publisher.offer(intake.loads)
    running = asyncio.create_task(publisher.run())
    async with asyncio.timeout(20):
        while (message := await subscription.get_message(ignore_subscribe_messages=True, timeout=1.0)) is None:
            pass
    running.cancel()
    await subscription.aclose()
    load = msgspec.msgpack.decode(message["data"], type=ReplicaLoad)
    assert (load.replica, load.at, load.state, load.running, load.waiting, load.blocks_total) == (
        "r1", NOW, ReplicaState.READY, 3, 2, 10,
    )  # fmt: skip
    last = float(await session.scalar(text("SELECT date_part('epoch', last_report_at) FROM replicas")) or 0)
    (view,) = await service.list_replicas(session, redis, last + 7.0)
    assert view.gauges == gauges
    assert view.age_s == pytest.approx(7.0)
    assert (view.state, view.model, view.core_epoch) == (ReplicaState.READY, MODEL, 1)


async def test_f14_without_redis_the_replicas_are_still_listed(session: AsyncSession) -> None:
    await service.ensure_pool(session, POOL, MODEL)
    await service.take_in(session, [report()], NOW)
    nowhere = Redis.from_url("redis://127.0.0.1:1/0", socket_connect_timeout=0.2)
    (view,) = await service.list_replicas(session, nowhere, NOW)
    assert view.gauges is None and view.state is ReplicaState.READY
    await nowhere.aclose()


async def test_old_events_and_long_lost_replicas_are_forgotten_in_batches(session: AsyncSession) -> None:
    await service.ensure_pool(session, POOL, MODEL)
    await service.take_in(session, [report(f"r{n}") for n in range(5)], NOW)
    await session.execute(
        text("UPDATE replicas SET state = 'lost', state_since = now() - interval '9 days' WHERE id <> 'r0'")
    )
    week = 7 * 86_400.0
    assert await service.forget(session, events_after_s=week, lost_after_s=week, limit=3) == 3
    assert await service.forget(session, events_after_s=week, lost_after_s=week, limit=3) == 1
    assert [route.replica for route in (await service.load_fleet(session)).replicas] == ["r0"]
    await session.execute(text("UPDATE replica_events SET at = now() - interval '8 days'"))
    assert await service.forget(session, events_after_s=week, lost_after_s=week, limit=100) == 1
