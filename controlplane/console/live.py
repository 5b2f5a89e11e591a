"""The Overview's live source: one computation for everybody who watches.

Layer: service. While somebody watches, each window with watchers is computed at most once a second: when a replica's
load arrives on Redis, else every two seconds. A watcher holds one latest-wins slot, never a queue, so a slow browser
costs nothing. It never answers a request by itself and never hides an outage: figures that cannot be computed stay,
under a status that says so.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import msgspec
from markupsafe import Markup
from redis.asyncio import Redis
from redis.exceptions import RedisError

from controlplane.console import regions
from controlplane.console.templates import Templates
from controlplane.errors import CapacityError
from controlplane.fleet.schemas import LOAD_CHANNEL
from controlplane.outage import away
from controlplane.telemetry.schemas import Overview, Series

log = logging.getLogger("tidegate.console")

SHORTEST_S = 1.0
LONGEST_S = 2.0
COMPUTE_TIMEOUT_S = 5.0
MOST_WATCHERS = 256
IDLE_READ_S = 30.0
"""One wait for a Redis message; silence is no error."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 10.0
"""Between two tries to reach Redis."""

Load = Callable[[int], Awaitable[Overview]]


def encode_event(name: str, text: str) -> bytes:
    """One server-sent event; every line of `text` becomes a `data:` line."""
    lines = "".join(f"data: {line}\n" for line in text.splitlines() or [""])
    return f"event: {name}\n{lines}\n".encode()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one window's page shows as of `at` (monotonic); `overview` is the last that could be computed.

    `payload` picks what a watcher has not seen.
    """

    version: int
    at: float
    regions: dict[str, Markup]
    overview: Overview | None
    full: bytes
    delta: bytes

    def payload(self, seen: int) -> bytes:
        """Bytes for a watcher whose last version is `seen` (0: nothing yet)."""
        if seen == self.version:
            return b""
        return self.delta if seen == self.version - 1 else self.full


@dataclass(slots=True)
class _Topic:
    """One window: its newest snapshot and who watches it."""

    snapshot: Snapshot | None = None
    failing_since: float | None = None
    watchers: set[Watcher] = field(default_factory=set)

    def is_fresh(self, at_most_s: float) -> bool:
        """Whether there is a snapshot not older than that."""
        return self.snapshot is not None and time.monotonic() - self.snapshot.at <= at_most_s


class Watcher:
    """One open page's slot. Only its own stream awaits it."""

    def __init__(self, topic: _Topic) -> None:
        self._topic = topic
        self._changed = asyncio.Event()
        self._seen = 0
        self._closed = False
        if topic.is_fresh(LONGEST_S):
            self._changed.set()  # an older one waits to be replaced: nobody is shown figures of an hour ago first

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        """End `next` with None, now and ever after."""
        self._closed = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """What changed since the last call, waiting for it; None once closed."""
        await self._changed.wait()
        self._changed.clear()
        if self._closed:
            self._changed.set()
            return None
        snapshot = self._topic.snapshot
        assert snapshot is not None  # a watcher is woken by a snapshot or by its end
        payload = snapshot.payload(self._seen)
        self._seen = snapshot.version
        return payload


class Broadcaster:
    """Computes, renders and hands out snapshots by window."""

    def __init__(
        self,
        load: Load,
        templates: Templates,
        *,
        windows: tuple[int, ...],
        stale_after_s: float,
        most_watchers: int = MOST_WATCHERS,
        wall: Callable[[], float] = time.time,
        compute_timeout_s: float = COMPUTE_TIMEOUT_S,
    ) -> None:
        self._load = load
        self._templates = templates
        self._stale_after_s = stale_after_s
        self._most = most_watchers
        self._wall = wall
        self._compute_timeout_s = compute_timeout_s
        self._topics = {window: _Topic() for window in windows}
        self._computing = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()
        self._redis_away_since: float | None = None
        self.computations = 0

    @property
    def watchers(self) -> int:
        """How many streams are open."""
        return sum(len(topic.watchers) for topic in self._topics.values())

    def wake(self) -> None:
        """Something changed: compute soon instead of at the next tick."""
        self._news.set()

    def redis_answers(self, answers: bool) -> None:
        """What the follower of Redis knows; pages say so."""
        if answers:
            self._redis_away_since = None
        elif self._redis_away_since is None:
            self._redis_away_since = self._wall()

    async def snapshot(self, window_s: int) -> Snapshot:
        """The newest snapshot of a window, computed now unless one is at most two seconds old."""
        topic = self._topics[window_s]
        async with self._computing:
            if not topic.is_fresh(LONGEST_S):
                await self._refresh(window_s, topic)
            assert topic.snapshot is not None
            return topic.snapshot

    @contextmanager
    def watch(self, window_s: int) -> Iterator[Watcher]:
        """A slot for one stream, given back at exit. Raises CapacityError when too many pages watch."""
        if self.watchers >= self._most:
            raise CapacityError(
                f"{self._most} pages are watching already; this one can be reloaded by hand",
                code="too_many_watchers",
                headers={"retry-after": "10"},
            )
        topic = self._topics[window_s]
        watcher = Watcher(topic)
        topic.watchers.add(watcher)
        self._wanted.set()
        self._news.set()
        try:
            yield watcher
        finally:
            topic.watchers.discard(watcher)
            if self.watchers == 0:
                self._wanted.clear()

    async def run(self) -> None:
        """Keep the watched windows fresh until cancelled; rests while nobody watches."""
        while True:
            await self._wanted.wait()
            self._news.clear()
            started = time.monotonic()
            for window_s, topic in self._topics.items():
                if topic.watchers and not topic.is_fresh(SHORTEST_S / 2):
                    async with self._computing:
                        await self._refresh(window_s, topic)
            await asyncio.sleep(max(0.0, started + SHORTEST_S - time.monotonic()))
            try:
                async with asyncio.timeout(max(0.0, started + LONGEST_S - time.monotonic())):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _refresh(self, window_s: int, topic: _Topic) -> None:
        self.computations += 1
        now = self._wall()
        try:
            async with asyncio.timeout(self._compute_timeout_s):
                overview = await self._load(window_s)
            rendered = regions.overview_regions(
                self._templates,
                overview,
                stale_after_s=self._stale_after_s,
                redis_away_since=self._redis_away_since,
            )
            newest: Overview | None = overview
            topic.failing_since = None
        except Exception as error:
            if topic.failing_since is None:
                topic.failing_since = now
                log.warning("the Overview cannot be computed: %s", error, exc_info=away(error) is None)
            before = topic.snapshot
            rendered = dict(before.regions) if before else regions.unavailable_regions(self._templates)
            rendered["status"] = regions.failed_status(self._templates, away(error), topic.failing_since)
            newest = before.overview if before else None
        topic.snapshot = _next_snapshot(topic.snapshot, rendered, newest)
        for watcher in topic.watchers:
            watcher.wake()

    def close(self) -> None:
        """End every stream."""
        for topic in self._topics.values():
            for watcher in topic.watchers:
                watcher.close()


def _next_snapshot(before: Snapshot | None, rendered: dict[str, Markup], overview: Overview | None) -> Snapshot:
    series = overview.series if overview else None
    known = before.overview.series if before and before.overview else None
    events = {name: encode_event(name, text) for name, text in rendered.items()}
    changed = [name for name in events if before is None or before.regions.get(name) != rendered[name]]
    return Snapshot(
        version=before.version + 1 if before else 1,
        at=time.monotonic(),
        regions=rendered,
        overview=overview,
        full=b"".join(events.values()) + _series_bytes(series, None),
        delta=b"".join(events[name] for name in changed) + _series_bytes(series, known),
    )


def _series_bytes(series: Series | None, previous: Series | None) -> bytes:
    event = regions.series_event(series, previous) if series is not None else None
    return encode_event("series", msgspec.json.encode(event).decode()) if event is not None else b""


async def follow_load(redis: Redis, broadcaster: Broadcaster, *, rng: random.Random) -> None:
    """Wake `broadcaster` for every load published on Redis, until cancelled; reconnects with jittered backoff."""
    delay_s = FIRST_DELAY_S
    while True:
        try:
            async with redis.pubsub(ignore_subscribe_messages=True) as pubsub:
                await pubsub.subscribe(LOAD_CHANNEL)
                broadcaster.redis_answers(True)
                delay_s = FIRST_DELAY_S
                while True:
                    if await pubsub.get_message(timeout=IDLE_READ_S) is not None:
                        broadcaster.wake()
        except (RedisError, OSError, TimeoutError) as error:
            broadcaster.redis_answers(False)
            log.warning("load is not followed, Redis does not answer: %s", type(error).__name__)
        await asyncio.sleep(delay_s * rng.uniform(0.5, 1.5))
        delay_s = min(delay_s * 2, LONGEST_DELAY_S)


@asynccontextmanager
async def running(broadcaster: Broadcaster, redis: Redis) -> AsyncIterator[None]:
    """The broadcaster at work: its two tasks end, and its streams with them, at exit."""
    tasks = [
        asyncio.create_task(broadcaster.run(), name="console-broadcaster"),
        asyncio.create_task(follow_load(redis, broadcaster, rng=random.Random()), name="console-load"),  # noqa: S311
    ]
    try:
        yield
    finally:
        broadcaster.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
