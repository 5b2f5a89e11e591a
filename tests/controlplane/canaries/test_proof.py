"""Canaries on the whole gateway: every limit is proven, and what is broken on purpose is found (F5)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from controlplane.admission.charges import NOTHING, Use
from controlplane.canaries import proof as proofs
from controlplane.canaries.ground import Ground, NoGroundError
from controlplane.canaries.probe import PROMPTS, UnreachableError
from controlplane.canaries.schemas import Cell, Verdict
from controlplane.canaries.verdict import Limited
from controlplane.db import transaction
from controlplane.gateway import metering, refusals
from controlplane.gateway.metering import Held, Meter
from controlplane.gateway.paths import INFERENCE
from controlplane.quotas import service as quotas
from controlplane.quotas.limits import LimitIndex
from controlplane.quotas.schemas import Limit, QuotaKind, QuotaLevel
from controlplane.redis_client import create_redis
from controlplane.tenants import service as tenants
from controlplane.tenants.schemas import PROBE_TENANT
from dataplane.protocol import ReplicaState
from tests.controlplane.canaries.conftest import PROMPT as PROMPT_TOKENS
from tests.controlplane.canaries.conftest import Site

DAY, MONEY = QuotaKind.TOKENS_PER_DAY, QuotaKind.MONEY_PER_DAY
RPM, TPM, CONCURRENT = QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.TOKENS_PER_MINUTE, QuotaKind.CONCURRENT_REQUESTS
UNCACHED = QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE
PROMPT = QuotaKind.MAX_PROMPT_TOKENS
PROVEN = (Verdict.PROVEN, "")
Break = Callable[[pytest.MonkeyPatch], None]


def test_f5_every_endpoint_of_the_table_has_a_probe() -> None:
    assert set(PROMPTS) == set(INFERENCE)


async def found(site: Site, *cells: Cell) -> list[tuple[Verdict, str]]:
    return [(one.verdict, one.why) for one in await site.prove(*cells)]


@pytest.mark.parametrize("counted", [None, PROMPT_TOKENS], ids=["nobody counts", "counts prompts"])
async def test_f5_one_of_each_shape_of_limit_is_proven_at_each_level_and_endpoint(
    site: Site, counted: int | None
) -> None:
    """A replica that counts makes the gateway let more prompts pass than their bytes would allow."""
    site.replica.tokens = counted
    await site.price()
    cells = [
        site.cell(RPM, QuotaLevel.TENANT, "/completions"),
        site.cell(MONEY, QuotaLevel.TENANT),
        site.cell(DAY, QuotaLevel.PROJECT),
        site.cell(CONCURRENT, QuotaLevel.PROJECT, "/completions"),
        site.cell(PROMPT, QuotaLevel.KEY, "/completions"),
        site.cell(PROMPT, QuotaLevel.TENANT),
        site.cell(TPM, QuotaLevel.KEY),
    ]
    assert await found(site, *cells) == [PROVEN] * len(cells)


@pytest.mark.slow
@pytest.mark.parametrize("counted", [None, PROMPT_TOKENS], ids=["nobody counts", "counts prompts"])
@pytest.mark.parametrize("endpoint", INFERENCE)
@pytest.mark.parametrize("level", QuotaLevel)
async def test_f5_every_kind_of_limit_is_proven(
    site: Site, level: QuotaLevel, endpoint: str, counted: int | None
) -> None:
    site.replica.tokens = counted
    await site.price()
    ends = await found(site, *(site.cell(kind, level, endpoint) for kind in QuotaKind))
    assert dict(zip(QuotaKind, ends, strict=True)) == dict.fromkeys(QuotaKind, PROVEN)


async def test_a_run_leaves_no_limit_and_no_usable_key(site: Site) -> None:
    async with site.prepared() as (prepared, _):
        key = prepared.key.reveal()
        assert (await site.gateway.status(key, max_tokens=1))[0] == 200
    assert (await site.gateway.status(key))[0] == 401
    await site.prove(site.cell(RPM))
    async with transaction(site.accounts.engine) as session:
        assert (await quotas.list_quotas(session, PROBE_TENANT)).items == []
        keys = (await tenants.list_keys(session, PROBE_TENANT)).items
        assert len(keys) == 2 and all(one.revoked_at is not None and one.expires_at is not None for one in keys)
        await tenants.retire_keys(session, PROBE_TENANT, forget_after_s=0.0)
    async with transaction(site.accounts.engine) as session:
        await tenants.retire_keys(session, PROBE_TENANT, forget_after_s=0.0)
        assert (await tenants.list_keys(session, PROBE_TENANT)).items == []


@pytest.fixture
async def leaving(site: Site, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """All that was used of a minute is out of it by the time a limit is opened above what was used."""
    real, redis, closed = Ground.change, create_redis(site.settings.redis_url), False

    async def change(self: Ground, limit: Limited, hard: int) -> Limited:
        nonlocal closed
        changed = await real(self, limit, hard)
        if closed and hard:
            names = [name async for name in redis.scan_iter(match=f"*:{limit.kind.value}:*")]
            assert names and await redis.delete(*names)
        closed = hard == 0
        return changed

    monkeypatch.setattr(Ground, "change", change)
    yield
    await redis.aclose()


@pytest.mark.usefixtures("leaving")
async def test_what_leaves_a_minute_while_it_is_looked_at_makes_no_limit_failing(site: Site) -> None:
    site.replica.tokens = PROMPT_TOKENS
    assert await found(site, site.cell(UNCACHED), site.cell(TPM)) == [PROVEN] * 2


@pytest.mark.usefixtures("leaving")
async def test_f5_a_limit_that_is_not_enforced_fails_also_while_use_leaves(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "ADOPTED_S", 1.0)
    only_what_is_closed_is_enforced(monkeypatch)
    ((verdict, said),) = await found(site, site.cell(UNCACHED))
    assert verdict is Verdict.FAILED and "above the limit" in said


# --------------------------------------------------------------------------------------------------------------
# What is broken on purpose fails
# --------------------------------------------------------------------------------------------------------------


def nothing_is_enforced(patch: pytest.MonkeyPatch) -> None:
    async def take(self: Meter, grant: Any, *_: Any, **__: Any) -> Held:
        return Held(lease=metering._free(grant, 0.0))

    patch.setattr(Meter, "take", take)


def only_what_is_closed_is_enforced(patch: pytest.MonkeyPatch) -> None:
    real = Meter.take

    async def take(self: Meter, grant: Any, *args: Any, **named: Any) -> Held:
        try:
            return await real(self, grant, *args, **named)
        except refusals.RateLimitedError:
            if any(limit.hard == 0 for limit in (await self.quotas.of(grant.tenant_id)).quotas.limits):
                raise
            return Held(lease=metering._free(grant, 0.0))

    patch.setattr(Meter, "take", take)


def everything_is_charged_as_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Meter, "_worst", lambda *_: Use(input=1, uncached_input=1, output=0, money=1))


def nothing_is_settled(patch: pytest.MonkeyPatch) -> None:
    async def settle(self: Meter, held: Held, use: Use) -> None:
        return None

    patch.setattr(Meter, "settle", settle)


def all_is_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Meter, "used", lambda *_: NOTHING)


def no_wait_is_told(patch: pytest.MonkeyPatch) -> None:
    class Silent(refusals.RateLimitedError):
        def __init__(self, message: str, *, headers: dict[str, str], **more: Any) -> None:
            kept = {name: value for name, value in headers.items() if name != "retry-after"}
            super().__init__(message, headers=kept, **more)

    patch.setattr(refusals, "RateLimitedError", Silent)


def the_status_is_wrong(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refusals.RateLimitedError, "status", 503)


def no_reason_is_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refusals, "_reason", lambda code, one: code)


BROKEN: dict[str, tuple[Break, tuple[QuotaKind, ...], str]] = {
    "nothing enforced": (nothing_is_enforced, tuple(QuotaKind), "not refused above the limit"),
    "only closed limits": (only_what_is_closed_is_enforced, (RPM, UNCACHED, DAY), "above the limit"),
    "charged as one": (everything_is_charged_as_one, (TPM, MONEY), ""),
    "never settled": (nothing_is_settled, (TPM, DAY, MONEY), "after settlement"),
    "slot kept": (nothing_is_settled, (CONCURRENT,), "refused within the limit"),
    "refunded in full": (all_is_given_back, (TPM, DAY), "after settlement"),
    "no Retry-After": (no_wait_is_told, (RPM, DAY, CONCURRENT), "no Retry-After"),
    "wrong status": (the_status_is_wrong, (RPM,), "refused with 503"),
    "no reason": (no_reason_is_told, (RPM, PROMPT), "x-tidegate-reason lacks limit="),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_f5_a_limit_that_is_broken_on_purpose_turns_to_failing(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    breaks, kinds, why = BROKEN[name]
    await site.price()
    monkeypatch.setattr(proofs, "ADOPTED_S", 0.5)
    monkeypatch.setattr(proofs, "SETTLED_S", 0.5)
    breaks(monkeypatch)
    for kind, (verdict, said) in zip(kinds, await found(site, *map(site.cell, kinds)), strict=True):
        assert verdict is Verdict.FAILED, (kind, said)
        assert why in said, kind


@pytest.mark.parametrize("level", QuotaLevel)
async def test_f5_a_level_whose_limits_are_forgotten_fails_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch, level: QuotaLevel
) -> None:
    monkeypatch.setattr(proofs, "ADOPTED_S", 2.0)
    real = LimitIndex.limits_for

    def limits_for(self: LimitIndex, **whose: str) -> tuple[Limit, ...]:
        return tuple(limit for limit in real(self, **whose) if limit.level is not level)

    monkeypatch.setattr(LimitIndex, "limits_for", limits_for)
    verdicts = [verdict for verdict, _ in await found(site, *(site.cell(RPM, each) for each in QuotaLevel))]
    assert verdicts == [Verdict.FAILED if each is level else Verdict.PROVEN for each in QuotaLevel]


# --------------------------------------------------------------------------------------------------------------
# What cannot be tried is not called proven, nor failing
# --------------------------------------------------------------------------------------------------------------


async def test_money_is_not_proven_without_a_price(site: Site) -> None:
    assert await found(site, site.cell(MONEY), site.cell(RPM)) == [
        (Verdict.NOT_RUN, "the pool has no price"),
        PROVEN,
    ]


async def test_without_a_ready_replica_nothing_is_run(site: Site) -> None:
    await site.accounts.replica("r0", "pool-m", site.replica.url, ReplicaState.DRAINING)
    with pytest.raises(NoGroundError, match="no replica is ready"):
        await site.prove(site.cell(RPM))


async def test_a_replica_that_fails_says_nothing_of_the_limit(site: Site) -> None:
    async with site.prepared() as (prepared, requests):
        site.replica.behave = _away
        end = await proofs.prove(prepared, requests, site.cell(RPM))
    assert end.verdict is Verdict.NOT_RUN
    assert "503" in end.why


async def _away(*_: object) -> Any:
    from aiohttp import web

    return web.json_response({"error": {"message": "no", "code": "overloaded"}}, status=503)


async def test_a_gateway_that_does_not_answer_is_said_to_be_unreachable(site: Site) -> None:
    cell = Cell(gateway="http://127.0.0.1:9", endpoint=INFERENCE[0], level=QuotaLevel.KEY, kind=RPM)
    with pytest.raises(UnreachableError, match="cannot be reached"):
        await site.prove(cell)
    async with transaction(site.accounts.engine) as session:
        assert (await quotas.list_quotas(session, PROBE_TENANT)).items == []


async def test_an_inactive_probe_tenant_is_a_reason_not_to_run(site: Site) -> None:
    await site.prove(site.cell(RPM))
    async with transaction(site.accounts.engine) as session:
        await tenants.set_tenant_active(session, PROBE_TENANT, False)
    with pytest.raises(NoGroundError, match="not active"):
        await site.prove(site.cell(RPM))
