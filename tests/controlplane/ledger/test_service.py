"""The ledger holds every attempt once, and all sums agree."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import transaction
from controlplane.errors import InvalidRequestError
from controlplane.ledger import service
from controlplane.ledger.schemas import UsageDimension
from controlplane.settings import Settings
from controlplane.tenants.schemas import PROBE_TENANT
from dataplane.protocol import UsageBasis, UsageRecord
from tests.controlplane.clients import deployment
from tests.controlplane.telemetry.reports import usage

SINCE = datetime(2023, 11, 14, tzinfo=UTC)
UNTIL = datetime(2023, 11, 16, tzinfo=UTC)


def some_usage(rng: random.Random, number: int) -> list[UsageRecord]:
    found = []
    for n in range(number):
        prompt = rng.randint(1, 500)
        started = SINCE.timestamp() + rng.uniform(0, 2 * 86_400 - 10)
        found.append(
            usage(
                f"attempt-{n:04}",
                tenant=rng.choice(["acme", "globex", ""]),
                key_id=rng.choice(["k1", "k2", "k3"]),
                model=rng.choice(["small", "large"]),
                started_at=started,
                finished_at=started + rng.uniform(0, 9),
                prompt_tokens=prompt,
                cached_tokens=rng.randint(0, prompt),
                output_tokens=rng.randint(0, 100),
                basis=rng.choice(list(UsageBasis)),
            )
        )
    return found


async def test_an_attempt_is_stored_once_and_the_first_record_wins(session: AsyncSession) -> None:
    first, repeat = usage("same", output_tokens=5), usage("same", output_tokens=900)
    assert await service.record(session, [first, repeat]) == [first]
    assert await service.record(session, [repeat]) == []
    page = await service.usage_page(session)
    assert [(line.attempt_id, line.output_tokens, line.basis) for line in page.items] == [
        ("same", 5, UsageBasis.ENGINE)
    ]


async def test_concurrent_reports_of_the_same_attempts_store_each_once(committed_engine: AsyncEngine) -> None:
    records = [usage(f"attempt-{n}") for n in range(50)]

    async def store(order: list[UsageRecord]) -> int:
        async with transaction(committed_engine) as session:
            return len(await service.record(session, order))

    orders = [random.Random(seed).sample(records, len(records)) for seed in range(4)]
    assert sum(await asyncio.gather(*(store(order) for order in orders))) == 50
    async with transaction(committed_engine) as session:
        assert await session.scalar(text("SELECT count(*) FROM usage_ledger")) == 50


async def test_f8_sums_by_tenant_model_and_key_agree(session: AsyncSession, rng: random.Random) -> None:
    records = some_usage(rng, 300)
    await service.record(session, records)
    inside = [one for one in records if SINCE.timestamp() <= one.finished_at < UNTIL.timestamp()]
    for by, attribute in (
        (UsageDimension.TENANT, "tenant"),
        (UsageDimension.MODEL, "model"),
        (UsageDimension.KEY, "key_id"),
    ):
        totals = await service.usage_totals(session, by=by, since=SINCE, until=UNTIL)
        assert sum(total.attempts for total in totals) == len(inside)
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            assert sum(getattr(total, name) for total in totals) == sum(getattr(one, name) for one in inside)
        for total in totals:
            mine = [one for one in inside if getattr(one, attribute) == total.key]
            assert (total.attempts, total.output_tokens) == (len(mine), sum(one.output_tokens for one in mine))
    (acme,) = await service.usage_totals(session, by=UsageDimension.TENANT, since=SINCE, until=UNTIL, tenant="acme")
    assert acme.key == "acme"


async def test_totals_by_anything_tell_what_of_them_the_canaries_used(session: AsyncSession) -> None:
    def used(attempt: str, tenant: str, pool: str, output: int) -> UsageRecord:
        at = SINCE.timestamp() + 60
        return usage(attempt, tenant=tenant, pool=pool, output_tokens=output, started_at=at, finished_at=at + 1)

    await service.record(
        session,
        [
            used("a", "acme", "shared", 5),
            used("b", PROBE_TENANT, "shared", 2),
            used("c", PROBE_TENANT, "shared", 1),
            used("d", "acme", "own", 7),
        ],
    )
    totals = await service.usage_totals(session, by=UsageDimension.POOL, since=SINCE, until=UNTIL)
    told = {one.key: (one.output_tokens, one.canaries.attempts, one.canaries.output_tokens) for one in totals}
    assert told == {"shared": (8, 2, 3), "own": (7, 0, 0)}
    for tenant, canaries in (("acme", 0), (PROBE_TENANT, 2)):
        (shared, *_) = await service.usage_totals(
            session, by=UsageDimension.TENANT, since=SINCE, until=UNTIL, tenant=tenant
        )
        assert (shared.key, shared.canaries.attempts) == (tenant, canaries)


async def test_a_span_begins_inclusive_and_ends_exclusive(session: AsyncSession) -> None:
    edge = SINCE.timestamp()
    await service.record(session, [usage("edge", started_at=edge - 1, finished_at=edge)])
    day = timedelta(days=1)
    for since, until, expected in ((SINCE, SINCE + day, 1), (SINCE - day, SINCE, 0)):
        assert len(await service.usage_totals(session, by=UsageDimension.KEY, since=since, until=until)) == expected


async def test_pages_keep_to_a_span_too(session: AsyncSession) -> None:
    edge, hour = SINCE.timestamp(), timedelta(hours=1)
    await service.record(session, [usage(f"a{n}", started_at=edge, finished_at=edge + 3600 * n) for n in range(4)])
    for since, until, expected in (
        (SINCE + hour, SINCE + 3 * hour, ["a2", "a1"]),
        (SINCE + 3 * hour, None, ["a3"]),
        (None, SINCE + hour, ["a0"]),
    ):
        first = await service.usage_page(session, since=since, until=until, limit=1)
        rest = await service.usage_page(session, since=since, until=until, after=first.next) if first.next else None
        lines = [*first.items, *(rest.items if rest else [])]
        assert [line.attempt_id for line in lines] == expected
    for wrong in ({"since": UNTIL, "until": SINCE}, {"since": SINCE.replace(tzinfo=None)}):
        with pytest.raises(InvalidRequestError):
            await service.usage_page(session, **wrong)


@pytest.mark.parametrize(
    ("since", "until"),
    [
        (UNTIL, SINCE),
        (SINCE, SINCE),
        (SINCE, SINCE + timedelta(days=401)),
        (SINCE.replace(tzinfo=None), UNTIL.replace(tzinfo=None)),
    ],
)
async def test_an_impossible_span_is_refused(session: AsyncSession, since: datetime, until: datetime) -> None:
    with pytest.raises(InvalidRequestError):
        await service.usage_totals(session, by=UsageDimension.TENANT, since=since, until=until)


async def test_f31_pages_walk_the_whole_ledger_newest_first_in_one_query_each(
    session: AsyncSession, rng: random.Random
) -> None:
    records = [usage(f"a{n:03}", finished_at=1_700_000_001.0 + n // 3) for n in range(50)]
    await service.record(session, rng.sample(records, len(records)))
    statements: list[str] = []

    def record(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen((await session.connection()).sync_connection, "before_cursor_execute", record)
    walked, after = [], None
    while True:
        page = await service.usage_page(session, after=after, limit=7)
        walked += page.items
        after = page.next
        if after is None:
            break
    assert [line.attempt_id for line in walked] == sorted((one.attempt_id for one in records), reverse=True)
    assert len(statements) == 8
    mine = await service.usage_page(session, tenant="nobody")
    assert mine.items == [] and mine.next is None


@pytest.mark.parametrize("after", ["", "nonsense", "AAAA", "ä"])
async def test_a_foreign_cursor_is_refused(session: AsyncSession, after: str) -> None:
    with pytest.raises(InvalidRequestError):
        await service.usage_page(session, after=after)


@pytest.mark.parametrize("statement", ["UPDATE usage_ledger SET output_tokens = 0", "DELETE FROM usage_ledger"])
async def test_the_ledger_is_append_only_whoever_asks(session: AsyncSession, statement: str) -> None:
    await service.record(session, [usage()])
    with pytest.raises(DBAPIError, match="append-only"):
        await session.execute(text(statement))


async def test_refused_records_are_kept_aside_once_and_counted_nowhere(session: AsyncSession) -> None:
    bad = usage("bad", prompt_tokens=-1)
    for _ in range(2):
        await service.set_aside(session, [(bad, "negative"), (bad, "negative")])
    assert await session.scalar(text("SELECT count(*) FROM usage_refused")) == 1
    assert (await service.usage_page(session)).items == []
    await session.execute(text("UPDATE usage_refused SET refused_at = now() - interval '2 days'"))
    assert await service.forget_refused(session, older_than_s=3 * 86_400, limit=10) == 0
    assert await service.forget_refused(session, older_than_s=86_400, limit=10) == 1


async def test_the_usage_api_is_for_operators_and_viewers(settings: Settings) -> None:
    async with deployment(settings, ["tenants", "accounts", "fleet", "telemetry", "ledger"]) as deployed:
        async with transaction(deployed.app.state.resources.engine) as session:
            await service.record(session, [usage(f"a{n}") for n in range(3)])
        span = {"since": SINCE.isoformat(), "until": UNTIL.isoformat(), "by": "model"}
        for headers, status in (
            ({}, 401),
            (deployed.tenant_member, 401),
            (deployed.viewer, 200),
            (deployed.operator, 200),
        ):
            for path, query in (("/api/v1/usage", {"limit": "2"}), ("/api/v1/usage/totals", span)):
                answer = await deployed.client.get(path, params=query, headers=headers)
                assert answer.status_code == status, answer.text
        page = (await deployed.client.get("/api/v1/usage", params={"limit": "2"}, headers=deployed.viewer)).json()
        assert [line["attempt_id"] for line in page["items"]] == ["a2", "a1"]
        rest = await deployed.client.get("/api/v1/usage", params={"after": page["next"]}, headers=deployed.viewer)
        assert [line["attempt_id"] for line in rest.json()["items"]] == ["a0"]
        for query in ({"limit": "0"}, {"limit": "x"}, {"after": "junk"}):
            answer = await deployed.client.get("/api/v1/usage", params=query, headers=deployed.viewer)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
