"""Runs of canaries: claimed once, worked off in pieces, and what is known of each limit afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.canaries import proof, service, tasks
from controlplane.canaries.repository import Run
from controlplane.canaries.schemas import CanaryState, CanaryView, Cell, Marks, Proof, Verdict, state_of
from controlplane.db import create_engine, transaction
from controlplane.gateway.paths import INFERENCE
from controlplane.quotas.schemas import QuotaKind, QuotaLevel
from controlplane.redis_client import create_redis
from controlplane.settings import Settings, SettingsError
from controlplane.worker import ExpectedEnd, JobContext
from tests.controlplane.canaries.conftest import Site
from tests.controlplane.canaries.test_proof import nothing_is_enforced
from tests.controlplane.gateway.deployment import Accounts

HOUR = 3600.0
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


@dataclass
class Jobs:
    """Runs jobs as the worker does, in this loop; `published` is what they start."""

    settings: Settings
    engine: AsyncEngine
    redis: Any
    published: list[tuple[Any, ...]] = field(default_factory=list)

    async def run(self, job: Callable[..., Awaitable[None]], *args: Any) -> None:
        started: list[tuple[Any, ...]] = []
        async with transaction(self.engine) as session:
            context = JobContext(
                session,
                time.time(),
                "test",
                lambda name, *values: started.append((name, *values)),
                self.settings,
                self.engine,
                self.redis,
            )
            await job(context, *args)
        self.published += started

    async def whole(self) -> None:
        """Claim and run until nothing is left."""
        await self.run(tasks.claim_run)
        while self.published:
            name, *args = self.published.pop()
            await self.run({tasks.RUN: tasks.run_canaries, tasks.CLAIM: tasks.claim_run}[name], *args)

    async def known(self) -> list[CanaryView]:
        async with transaction(self.engine) as session:
            return await service.all_canaries(session, every_s=self.settings.canary_every_s)


@pytest.fixture
async def jobs(settings: Settings) -> AsyncIterator[Jobs]:
    engine, redis = create_engine(settings), create_redis(settings.redis_url)
    yield Jobs(settings, engine, redis)
    await redis.aclose()
    await engine.dispose()


async def test_a_first_run_makes_a_canary_of_each_limit_endpoint_and_gateway(jobs: Jobs) -> None:
    two = structs.replace(jobs.settings, canary_gateways="http://a.example:1,http://b.example:2")
    jobs.settings = two
    assert await jobs.known() == []
    await jobs.whole()
    known = await jobs.known()
    assert len(known) == 2 * len(INFERENCE) * len(QuotaLevel) * len(QuotaKind)
    assert {(view.state, view.why) for view in known} == {(CanaryState.NOT_RUN, "no replica is ready")}
    jobs.settings = structs.replace(two, canary_gateways="http://b.example:2")
    async with transaction(jobs.engine) as session:
        await session.execute(
            text("UPDATE canary_runs SET window_start = window_start - 3600, done_at = done_at - interval '1 hour'")
        )
        await session.execute(text("UPDATE canaries SET window_start = 0"))
    await jobs.whole()
    assert {view.gateway for view in await jobs.known()} == {"http://b.example:2"}


async def test_a_run_is_claimed_for_as_many_gateways_as_canaries_are_kept_of(jobs: Jobs) -> None:
    many = [f"http://gateway-{number}.example:1" for number in range(150)]
    jobs.settings = structs.replace(jobs.settings, canary_gateways=",".join(many))
    await jobs.run(tasks.claim_run)
    assert [name for name, *_ in jobs.published] == [tasks.RUN]
    known = await jobs.known()
    assert len(known) == service.MOST_CANARIES
    of_one = len(INFERENCE) * len(QuotaLevel) * len(QuotaKind)
    assert [view.gateway for view in known[: 2 * of_one]] == [many[0]] * of_one + [many[1]] * of_one


async def test_f39_of_claims_at_once_one_runs(jobs: Jobs) -> None:
    await asyncio.gather(*(jobs.run(tasks.claim_run) for _ in range(8)))
    await jobs.run(tasks.claim_run)
    assert len(jobs.published) == 1


async def test_f38_a_redelivered_run_does_nothing(jobs: Jobs) -> None:
    await jobs.run(tasks.claim_run)
    (_, *claim), jobs.published = jobs.published[0], []
    await jobs.run(tasks.run_canaries, *claim)
    known = await jobs.known()
    with pytest.raises(ExpectedEnd, match="taken over"):
        await jobs.run(tasks.run_canaries, *claim)
    assert await jobs.known() == known
    assert jobs.published == []
    await jobs.run(tasks.claim_run)
    assert jobs.published == [], "the schedule's run is done"


async def test_f38_whoever_lost_its_claim_writes_nothing(jobs: Jobs) -> None:
    await jobs.run(tasks.claim_run)
    async with transaction(jobs.engine) as session:
        lost = await service.begin(session, Run(*jobs.published[0][1:]), holder="slow")
        ((canary, _),) = await service.due(session, lost, 1)
        await session.execute(text("UPDATE canary_runs SET expires_at = now() - interval '1 second'"))
    await jobs.run(tasks.claim_run)
    for write in (
        lambda session: service.conclude(session, lost, canary, Proof(verdict=Verdict.PROVEN)),
        lambda session: service.end(session, lost),
    ):
        with pytest.raises(service.StaleRunError):
            async with transaction(jobs.engine) as session:
                await write(session)
    assert {view.state for view in await jobs.known()} == {CanaryState.NEVER_RUN}


async def test_what_does_not_fit_one_job_is_left_to_the_next(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MOST_CELLS", 50)
    await jobs.run(tasks.claim_run)
    (_, window, fence), jobs.published = jobs.published[0], []
    await jobs.run(tasks.run_canaries, window, fence)
    assert jobs.published == [(tasks.CLAIM,)]
    assert sum(view.state is CanaryState.NOT_RUN for view in await jobs.known()) == 50
    jobs.published = []
    await jobs.run(tasks.claim_run)
    ((_, same, later),) = jobs.published
    assert (same, later > fence) == (window, True)
    jobs.published = []
    await jobs.run(tasks.run_canaries, same, later)
    assert jobs.published == []
    assert {view.state for view in await jobs.known()} == {CanaryState.NOT_RUN}


async def test_the_schedule_counts_from_the_last_run_not_from_the_clock(jobs: Jobs) -> None:
    async def claimed(minutes: float) -> bool:
        async with transaction(jobs.engine) as session:
            run = await service.claim(
                session, gateways=["http://a.example:1"], every_s=HOUR, holder="w", now=noon + 60 * minutes
            )
            done = text("UPDATE canary_runs SET done_at = to_timestamp(:at), expires_at = NULL WHERE done_at IS NULL")
            await session.execute(done, {"at": noon + 60 * minutes})
            return run is not None

    noon = NOW.timestamp()
    assert await claimed(-8)
    assert not await claimed(4), "as after a restart, in the next hour of the clock"
    assert not await claimed(51)
    assert await claimed(52)
    assert not await claimed(53)


async def test_a_run_that_was_asked_for_comes_beside_the_schedule(jobs: Jobs) -> None:
    await jobs.whole()
    before = await jobs.known()
    async with transaction(jobs.engine) as session:
        asked = await service.ask(session)
        assert asked == await service.ask(session) or asked.window_start < time.time()
    assert asked.canaries == len(before)
    await jobs.whole()
    after = await jobs.known()
    assert all(one.not_run_at < two.not_run_at for one, two in zip(before, after, strict=True))  # type: ignore[operator]
    await jobs.whole()
    assert await jobs.known() == after


async def test_what_waited_for_a_replica_is_run_as_soon_as_there_is_one(jobs: Jobs) -> None:
    await jobs.whole()
    await jobs.run(tasks.claim_run)
    assert jobs.published == []
    accounts = Accounts(jobs.settings)
    await accounts.pool("pool-m", "m")
    await accounts.replica("r0", "pool-m", "http://127.0.0.1:9")
    await accounts.close()
    await jobs.run(tasks.claim_run)
    await jobs.run(tasks.claim_run)
    assert len(jobs.published) == 1, "one run, not one a tick"


async def test_f5_a_limit_that_breaks_turns_to_failing_and_back_when_it_is_mended(
    site: Site, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [site.cell(QuotaKind.REQUESTS_PER_MINUTE), site.cell(QuotaKind.TOKENS_PER_DAY, QuotaLevel.PROJECT)]
    silent = Cell(
        gateway="http://127.0.0.1:9",
        endpoint=INFERENCE[0],
        level=QuotaLevel.KEY,
        kind=QuotaKind.REQUESTS_PER_MINUTE,
    )
    monkeypatch.setattr(service, "cells", lambda gateways: [*cells, silent])
    monkeypatch.setattr(proof, "ADOPTED_S", 2.0)

    async def states() -> list[CanaryState]:
        async with transaction(jobs.engine) as session:
            await session.execute(text("UPDATE canaries SET window_start = 0"))
            await session.execute(text("DELETE FROM canary_runs"))
        await jobs.whole()
        return [view.state for view in await jobs.known()]

    proven, failing, away = CanaryState.PROVEN, CanaryState.FAILING, CanaryState.NOT_RUN
    assert await states() == [proven, proven, away]
    with monkeypatch.context() as broken:
        nothing_is_enforced(broken)
        assert await states() == [failing, failing, away]
    known = await jobs.known()
    assert "not refused above the limit" in known[0].why
    assert known[0].proven_at is not None and known[0].failed_at is not None
    assert "cannot be reached" in known[2].why and known[2].proven_at is None
    assert await states() == [proven, proven, away]


def _ago(hours: float | None) -> datetime | None:
    return None if hours is None else NOW - timedelta(hours=hours)


@pytest.mark.parametrize(
    ("proven", "failed", "not_run", "expected"),
    [
        (None, None, None, CanaryState.NEVER_RUN),
        (1.9, None, None, CanaryState.PROVEN),
        (2.1, None, None, CanaryState.OVERDUE),
        (1, 0.5, None, CanaryState.FAILING),
        (0.5, 1, None, CanaryState.PROVEN),
        (None, 30, None, CanaryState.FAILING),
        (1, None, 0.5, CanaryState.NOT_RUN),
        (None, None, 0.5, CanaryState.NOT_RUN),
        (2, 1, 0.5, CanaryState.FAILING),
        (1, 2, 0.5, CanaryState.NOT_RUN),
        (0.1, 1, 0.5, CanaryState.PROVEN),
    ],
)
def test_the_last_ending_decides_and_a_proof_holds_for_two_schedules(
    proven: float | None, failed: float | None, not_run: float | None, expected: CanaryState
) -> None:
    marks = Marks(proven_at=_ago(proven), failed_at=_ago(failed), not_run_at=_ago(not_run))
    assert state_of(marks, NOW, HOUR) is expected


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("", ("http://gw.example:7301",)),
        ("http://a:1", ("http://a:1",)),
        ("http://a:1/,https://b/x,http://a:1", ("http://a:1", "https://b/x")),
    ],
)
def test_the_gateways_that_are_probed(offline_settings: Settings, named: str, expected: tuple[str, ...]) -> None:
    public = structs.replace(offline_settings, public_gateway_url="http://gw.example:7301/")
    assert structs.replace(public, canary_gateways=named).probed_gateways == expected


@pytest.mark.parametrize("named", ["a:1", "http://a:1,", "http://a:1 http://b:1", "http://a:0", "http://a?x=1"])
def test_gateways_that_cannot_be_are_refused_by_name(named: str) -> None:
    environment = {
        "DATABASE_URL": "postgresql://u:p@h/d",
        "REDIS_URL": "redis://h",
        "TIDEGATE_INTERNAL_TOKEN": "x" * 32,
        "TIDEGATE_SESSION_SECRET": "x" * 32,
        "TIDEGATE_CANARY_GATEWAYS": named,
    }
    with pytest.raises(SettingsError, match="TIDEGATE_CANARY_GATEWAYS"):
        Settings.from_env(environment)
