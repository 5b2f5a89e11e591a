"""The broadcaster: one computation for all, latest wins, outages are said and end by themselves."""

from __future__ import annotations

import asyncio
import json
import random

import msgspec
import pytest
from redis.asyncio import Redis

from controlplane.console.live import Broadcaster, encode_event, follow_load
from controlplane.console.templates import Templates
from controlplane.errors import CapacityError
from controlplane.fleet.schemas import LOAD_CHANNEL
from controlplane.telemetry.schemas import Overview
from tests.web.samples import EMPTY, an_overview, quantiles, series

TEMPLATES = Templates()


class Source:
    """Answers Overviews on demand, counts how often it was asked, and can be out of order."""

    def __init__(self) -> None:
        self.overview: Overview = an_overview()
        self.asked: list[int] = []
        self.broken: Exception | None = None

    async def __call__(self, window_s: int) -> Overview:
        self.asked.append(window_s)
        if self.broken is not None:
            raise self.broken
        return self.overview


def a_broadcaster(source: Source, **rest: int) -> Broadcaster:
    return Broadcaster(source, TEMPLATES, windows=(60, 300), stale_after_s=5.0, **rest)  # type: ignore[arg-type]


def events(payload: bytes) -> dict[str, str]:
    """Name → data of a payload, as a browser reads it."""
    found = {}
    for block in payload.decode().split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("event: "):
            found[lines[0][7:]] = "\n".join(line[6:] for line in lines[1:])
    return found


def test_an_event_survives_line_breaks() -> None:
    assert encode_event("x", "a\nb\r\nc") == b"event: x\ndata: a\ndata: b\ndata: c\n\n"
    assert encode_event("x", "") == b"event: x\ndata: \n\n"


async def test_many_watchers_cost_one_computation() -> None:
    source = Source()
    broadcaster = a_broadcaster(source)
    running = asyncio.create_task(broadcaster.run())
    contexts = [broadcaster.watch(300) for _ in range(50)]
    watchers = [context.__enter__() for context in contexts]
    payloads = await asyncio.gather(*[watcher.next() for watcher in watchers])
    assert len(set(payloads)) == 1
    assert source.asked == [300]
    for context in contexts:
        context.__exit__(None, None, None)
    assert broadcaster.watchers == 0
    running.cancel()


async def test_nobody_watching_costs_nothing() -> None:
    source = Source()
    broadcaster = a_broadcaster(source)
    running = asyncio.create_task(broadcaster.run())
    for _ in range(20):
        broadcaster.wake()
        await asyncio.sleep(0)
    assert source.asked == []
    running.cancel()


async def test_a_slow_watcher_gets_the_latest_and_a_current_one_only_what_changed() -> None:
    source = Source()
    broadcaster = a_broadcaster(source)
    topic = broadcaster._topics[300]
    await broadcaster._refresh(300, topic)
    with broadcaster.watch(300) as current, broadcaster.watch(300) as slow:
        first = await current.next()
        assert first is not None
        assert set(events(first)) >= {"status", "stats", "ttft", "replicas", "tenants", "series"}
        for n in (1, 2, 3):
            source.overview = an_overview(msgspec.structs.replace(EMPTY, ttft=quantiles(n, 0.1, 0.2, 0.3)))
            await broadcaster._refresh(300, topic)
            changed = await current.next()
            assert changed is not None
            assert "ttft" in events(changed)
            assert "replicas" not in events(changed)
            assert "series" not in events(changed)
        latest = await slow.next()
        assert latest is not None
        assert ">3<" in events(latest)["ttft"]


async def test_chart_points_are_sent_once_then_as_differences() -> None:
    source = Source()
    source.overview = an_overview(series=series([1.0, None, 2.0]))
    broadcaster = a_broadcaster(source)
    topic = broadcaster._topics[300]
    with broadcaster.watch(300) as watcher:
        await broadcaster._refresh(300, topic)
        full = json.loads(events(await watcher.next() or b"")["series"])
        assert len(full["rows"]) == 3
        source.overview = an_overview(series=series([1.0, None, 2.5]))
        await broadcaster._refresh(300, topic)
        delta = json.loads(events(await watcher.next() or b"")["series"])
        assert [row[:2] for row in delta["rows"]] == [[full["rows"][2][0], 2.5]]


async def test_an_outage_keeps_the_last_figures_says_since_when_and_ends_by_itself() -> None:
    source = Source()
    source.overview = an_overview(msgspec.structs.replace(EMPTY, ttft=quantiles(7, 0.1, 0.2, 0.3)))
    broadcaster = a_broadcaster(source)
    topic = broadcaster._topics[300]
    with broadcaster.watch(300) as watcher:
        await broadcaster._refresh(300, topic)
        await watcher.next()
        source.broken = ConnectionRefusedError("nobody listens")
        for _ in range(2):
            await broadcaster._refresh(300, topic)
        broken = events(await watcher.next() or b"")
        assert 'data-state="error"' in broken["status"]
        assert "PostgreSQL does not answer" in broken["status"]
        assert "since" in broken["status"]
        assert topic.snapshot is not None
        assert ">7<" in topic.snapshot.regions["ttft"]
        source.broken = None
        await broadcaster._refresh(300, topic)
        assert 'data-state="live"' in events(await watcher.next() or b"")["status"]


async def test_a_page_opened_during_an_outage_still_renders() -> None:
    source = Source()
    source.broken = ConnectionRefusedError("nobody listens")
    snapshot = await a_broadcaster(source).snapshot(300)
    assert 'data-state="error"' in snapshot.regions["status"]
    assert snapshot.overview is None


async def test_pages_opened_together_share_one_computation() -> None:
    source = Source()
    broadcaster = a_broadcaster(source)
    snapshots = await asyncio.gather(*[broadcaster.snapshot(60) for _ in range(20)])
    assert source.asked == [60]
    assert len({snapshot.version for snapshot in snapshots}) == 1


async def test_the_number_of_watchers_is_bounded() -> None:
    broadcaster = a_broadcaster(Source(), most_watchers=2)
    with broadcaster.watch(60), broadcaster.watch(300):
        with pytest.raises(CapacityError, match="2 pages are watching"), broadcaster.watch(60):
            pass
        assert broadcaster.watchers == 2
    with broadcaster.watch(60):
        assert broadcaster.watchers == 1


async def test_closing_ends_every_watcher_for_good() -> None:
    broadcaster = a_broadcaster(Source())
    with broadcaster.watch(60) as watcher:
        broadcaster.close()
        assert await watcher.next() is None
        assert await watcher.next() is None


async def test_a_load_published_on_redis_wakes_the_broadcaster(redis: Redis) -> None:
    broadcaster = a_broadcaster(Source())
    following = asyncio.create_task(follow_load(redis, broadcaster, rng=random.Random(1)))
    while not (await redis.pubsub_numsub(LOAD_CHANNEL))[0][1]:
        await asyncio.sleep(0.01)
    assert not broadcaster._news.is_set()
    await redis.publish(LOAD_CHANNEL, b"load")
    async with asyncio.timeout(10):
        await broadcaster._news.wait()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert (await redis.pubsub_numsub(LOAD_CHANNEL))[0][1] == 0


async def test_redis_away_is_noticed() -> None:
    broadcaster = a_broadcaster(Source())
    nowhere = Redis.from_url("redis://127.0.0.1:1")
    following = asyncio.create_task(follow_load(nowhere, broadcaster, rng=random.Random(1)))
    async with asyncio.timeout(10):
        while broadcaster._redis_away_since is None:
            await asyncio.sleep(0.01)
    status = (await broadcaster.snapshot(60)).regions["status"]
    assert "Redis does not answer" in status
    broadcaster.redis_answers(True)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await nowhere.aclose()


async def test_reports_every_moment_are_shown_about_once_a_second() -> None:
    source = Source()
    broadcaster = a_broadcaster(source)
    running = asyncio.create_task(broadcaster.run())
    loop = asyncio.get_running_loop()
    with broadcaster.watch(60) as watcher:
        await watcher.next()
        times = []
        for _ in range(2):
            waiting = asyncio.create_task(watcher.next())
            while not waiting.done():
                broadcaster.wake()
                await asyncio.sleep(0.02)
            times.append(loop.time())
    assert times[1] - times[0] >= 0.9  # never more often, whatever comes in
    assert len(source.asked) == 3
    running.cancel()


async def test_a_stream_opened_long_after_the_last_starts_with_figures_of_now() -> None:
    source = Source()
    broadcaster = a_broadcaster(source)
    topic = broadcaster._topics[60]
    await broadcaster.snapshot(60)
    assert topic.snapshot is not None
    object.__setattr__(topic.snapshot, "at", topic.snapshot.at - 3600)
    with broadcaster.watch(60) as watcher:
        waiting = asyncio.create_task(watcher.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        await broadcaster._refresh(60, topic)
        assert b"event: status" in (await waiting or b"")
