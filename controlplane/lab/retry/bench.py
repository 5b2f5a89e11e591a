"""`tidegate bench retry-after`: of the refused, how many pass when they wait exactly as long as they were told.

Layer: service. Starts a Valkey of its own for the limits; rooms are played in this process. Prints shares beside their
bars, and beside what a constant second would have done.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from redis.asyncio import Redis

from controlplane.admission.charges import Counter
from controlplane.admission.retry import Asker, Comebacks
from controlplane.lab.bench.report import Report, Section, Table
from controlplane.lab.retry.limits import Ask, Waits, limit, many_at_once, one_owner, random_asks
from controlplane.lab.retry.room import Constant, Outcome, Visit, body_size, bursts, of_one_size, replay
from controlplane.local.valkey import EmbeddedValkey
from controlplane.quotas.schemas import QuotaKind
from dataplane.bench.traces import TraceError, TraceRow, Traces

EXACT_BAR, ESTIMATE_BAR = 1.0, 0.9
ROOMS = (16, 64, 256, 1024)
ALIKE = 256
"""The room of the row in which a key's requests cannot be told apart."""
TRACES = ("conv", "vtc")
LOADS = (0.75, 0.85)
OVERLOAD = 1.2
NAMES = {Counter.RATE: "minute windows", Counter.CALENDAR: "calendar windows", Counter.HELD: "concurrency"}


def run(*, seed: int, quick: bool, traces: Path | None, tell: Callable[[str], None]) -> Report:
    """Play everything. Raises TraceError when `traces` is given and is no trace."""
    report = Report("retry-after", {"quick": quick, "traces": traces is not None}, seed)
    found = _traces(traces)
    tell("limits in a real store, on a clock of the replay's")
    report.take(asyncio.run(_limits(seed, quick, found)))
    tell("rooms that are full")
    report.take(_rooms(seed, quick, found))
    report.results["skipped"] = found.skipped
    return report


class _Found:
    """Rows of the traces that are there; `skipped` says why others are not."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[TraceRow, ...]] = {}
        self.skipped: dict[str, str] = {}


def _traces(path: Path | None) -> _Found:
    found = _Found()
    given = Traces(path)
    for name in TRACES:
        try:
            found.rows[name] = given.read(name, 20_000).rows
        except TraceError as error:
            found.skipped[name] = str(error)
    return found


# Limits ---------------------------------------------------------------------------------------------------------------


async def _limits(seed: int, quick: bool, found: _Found) -> Section:
    """Each set of limits with random requests, and with those of each trace."""
    count = 400 if quick else 4000
    section = Section()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tidegate-retry-") as folder:
        Path(folder).chmod(0o711)  # noqa: ASYNC240 - nothing else runs in this loop
        server = EmbeddedValkey(Path(folder) / "valkey")
        server.start()
        redis = Redis.from_url(server.url)
        try:
            for name, asks in _streams(seed, count, found):
                for counter, waits in await _cases(redis, asks):
                    rows.append(_limit_row(counter, name, waits))
                    section.results[f"{counter.name.lower()}_{name}"] = waits.share
        finally:
            await redis.aclose()
            server.stop()
    section.tables.append(
        Table(
            "Retry-After of limits: the refused that passed after exactly that long",
            ("limit", "requests", "of them", "refusals", "passed", "bar", "held", "mean wait s"),
            tuple(rows),
            "minute and calendar windows: a limit's owner is one client, which sends nothing while it waits; "
            "concurrency, whose wait is marked an estimate: everybody goes on, and there is no bar",
        )
    )
    return section


def _streams(seed: int, count: int, found: _Found) -> Iterator[tuple[str, list[Ask]]]:
    yield "random", list(random_asks(_rng(seed), count, 2.0))
    for name, rows in found.rows.items():
        asks, before = [], 0.0
        for row in rows[:count]:
            asks.append(Ask(row.arrival - before, max(1, row.prompt), max(1, row.output), _stay(row)))
            before = row.arrival
        yield name, asks


async def _cases(redis: Redis, asks: list[Ask]) -> list[tuple[Counter, Waits]]:
    """Limits that about half of `asks` have to wait for, whatever their sizes."""
    largest = max(ask.prompt + 2 * ask.output for ask in asks)
    span = sum(ask.gap for ask in asks)
    per_minute = len(asks) / span * 60
    tokens = sum(ask.prompt + ask.output for ask in asks)
    at_once = sum(ask.stay for ask in asks) / span
    minute = [
        limit(QuotaKind.REQUESTS_PER_MINUTE, max(2, round(per_minute * 0.7))),
        limit(QuotaKind.TOKENS_PER_MINUTE, max(largest, round(tokens / span * 60 * 0.7))),
        limit(QuotaKind.OUTPUT_TOKENS_PER_MINUTE, max(largest, round(sum(ask.output for ask in asks) / span * 120))),
    ]
    calendar = [
        limit(QuotaKind.TOKENS_PER_DAY, max(largest, tokens // 40)),
        limit(QuotaKind.TOKENS_PER_MONTH, max(largest, tokens // 8)),
    ]
    held = [limit(QuotaKind.CONCURRENT_REQUESTS, max(2, round(at_once * 1.2)))]
    windows = await one_owner(redis, minute, asks) | await one_owner(redis, calendar, asks)
    return [*windows.items(), (Counter.HELD, await many_at_once(redis, held, asks))]


def _limit_row(counter: Counter, source: str, waits: Waits) -> tuple[str, ...]:
    mean = waits.waited_s / waits.refusals if waits.refusals else 0.0
    barred = counter is not Counter.HELD
    return (
        NAMES[counter],
        source,
        f"{waits.requests:,}",
        f"{waits.refusals:,}",
        _percent(waits.share),
        _percent(EXACT_BAR) if barred else "",
        _held(waits.share, EXACT_BAR) if barred else "",
        f"{mean:,.1f}",
    )


# Rooms ----------------------------------------------------------------------------------------------------------------


def _rooms(seed: int, quick: bool, found: _Found) -> Section:
    """Requests that a gateway has no room for: random bursts and traces, and an overload that does not end."""
    section = Section()
    rows = []
    for name, room, visits, barred in _visits(seed, quick, found):
        estimate = replay(visits, Comebacks(room, _rng(seed)))
        constant = replay(visits, Constant(room))
        bar = ESTIMATE_BAR if barred else None
        rows.append(_room_row(name, room, estimate, constant, bar))
        section.results[f"capacity_{name}_{room}"] = estimate.share
        section.results[f"control_{name}_{room}"] = constant.share
    section.tables.append(
        Table(
            "Retry-After of capacity: the refused that passed after exactly that long, everybody coming back",
            (
                "requests",
                "room",
                "refused first",
                "refusals",
                "passed",
                "bar",
                "held",
                "mean wait s",
                "gave up",
                "most in 1 s",
                "always 1 s: passed",
                "gave up",
            ),
            tuple(rows),
            f"bursts offer 60 % of the room, and 160 % for about 5 s in 45; {OVERLOAD:.0%} for good has no bar: more "
            "arrives than can ever be served; nor has all alike: of one size, others of a key take what is kept for it",
        )
    )
    return section


def _visits(seed: int, quick: bool, found: _Found) -> Iterator[tuple[str, int, list[Visit], bool]]:
    seconds = 300.0 if quick else 1800.0
    for room in ROOMS:
        yield "bursts", room, bursts(_rng(seed), seconds, room, calm=0.6, rush=1.6), True
    alike = of_one_size(bursts(_rng(seed), seconds, ALIKE, calm=0.6, rush=1.6))
    yield "bursts, all alike", ALIKE, alike, False
    for name, rows in found.rows.items():
        visits = [
            Visit(row.arrival, _stay(row), Asker(row.client or f"key-{number % 20}", body_size(row.prompt)))
            for number, row in enumerate(rows)
        ]
        offered = sum(visit.stay for visit in visits) / (visits[-1].at - visits[0].at)
        for load in LOADS:
            yield f"{name} at {load:.0%}", max(1, round(offered / load)), visits, True
    yield f"{OVERLOAD:.0%} for good", 64, bursts(_rng(seed), 300.0, 64, calm=OVERLOAD, rush=OVERLOAD), False


def _room_row(name: str, room: int, estimate: Outcome, constant: Outcome, bar: float | None) -> tuple[str, ...]:
    return (
        name,
        str(room),
        f"{estimate.refused_visits / estimate.visits:.0%}",
        f"{estimate.refusals:,}",
        _percent(estimate.share),
        "" if bar is None else _percent(bar),
        "" if bar is None else _held(estimate.share, bar),
        f"{estimate.waited_s / max(1, estimate.refusals):.1f}",
        str(estimate.given_up),
        str(estimate.most_together),
        _percent(constant.share),
        str(constant.given_up),
    )


def _rng(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - a replay


def _stay(row: TraceRow) -> float:
    """Seconds of a request on some replica: 0.1 ms a token read, 30 ms a token written."""
    return 0.05 + row.prompt * 1e-4 + row.output * 0.03


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"


def _held(share: float | None, bar: float) -> str:
    return "" if share is None else "yes" if share >= bar else "NO"
