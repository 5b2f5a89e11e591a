"""Limits as a gateway knows them: believed while changes are heard, kept while nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.admission.charges import Use, charges_for
from controlplane.errors import CapacityError
from controlplane.fleet.schemas import FleetView
from controlplane.gateway import cache, quotas
from controlplane.gateway.auth import KeyDirectory
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.policy import PolicyChange
from controlplane.gateway.quotas import QuotaDirectory, TenantLimits
from controlplane.gateway.snapshot import SnapshotFile, SnapshotKeeper
from controlplane.gateway.table import PolicyTable
from controlplane.quotas.limits import effective
from controlplane.quotas.schemas import Limit, Price, QuotaKind, QuotaLevel, Raise, TenantQuotas
from controlplane.settings import Secret
from controlplane.slo.schemas import Slo
from controlplane.tenants.schemas import KeyGrant

PRICE = Price(pool="", uncached_input=1, cached_input=1, output=1, device_second=1, valid_from=0.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Store:
    """Postgres: the tenants' quotas, and how often they were read."""

    def __init__(self) -> None:
        self.hard = 5
        self.zone = "UTC"
        self.reads: list[str] = []
        self.away = False
        self.hold: asyncio.Event | None = None

    async def load(self, tenant_id: str) -> TenantQuotas | None:
        self.reads.append(tenant_id)
        if self.away:
            raise ConnectionRefusedError
        hard = self.hard
        if self.hold is not None:
            await self.hold.wait()
        return None if tenant_id == "nobody" else self.quotas(tenant_id, hard)

    def quotas(self, tenant_id: str, hard: int) -> TenantQuotas:
        limit = Limit(
            quota_id="q",
            level=QuotaLevel.TENANT,
            scope_id=tenant_id,
            model="",
            kind=QuotaKind.REQUESTS_PER_MINUTE,
            hard=hard,
        )
        return TenantQuotas(
            tenant_id=tenant_id, tenant=tenant_id, time_zone=self.zone, limits=(limit,), prices=(PRICE,), epoch=hard
        )


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def directory(store: Store, clock: Clock) -> AsyncIterator[QuotaDirectory]:
    directory = QuotaDirectory(store.load, clock=clock)
    yield directory
    await directory.close()


async def hard_of(directory: QuotaDirectory, tenant: str = "acme") -> int | None:
    return (await directory.of(tenant)).quotas.limits[0].hard


async def test_limits_are_read_once_while_changes_are_heard(directory: QuotaDirectory, store: Store) -> None:
    directory.on_listening()
    assert [await hard_of(directory) for _ in range(10)] == [5] * 10
    assert store.reads == ["acme"]


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("quotas", "acme"),
        ("quota_grants", "acme"),
        ("tenants", "acme"),
        ("prices", "pool-m"),
        ("quotas", ""),
        ("tenants", ""),
        ("prices", ""),
    ],
)
async def test_f17_a_change_takes_hold_with_the_next_request(
    directory: QuotaDirectory, store: Store, table: str, row: str
) -> None:
    directory.on_listening()
    assert await hard_of(directory) == 5
    store.hard = 9
    assert await hard_of(directory) == 5
    directory.on_change(PolicyChange(table=table, id=row, epoch=2))
    assert await hard_of(directory) == 9


async def test_other_changes_cost_no_read(directory: QuotaDirectory, store: Store) -> None:
    directory.on_listening()
    await hard_of(directory)
    for table, row in (("quotas", "other"), ("api_keys", "acme"), ("replicas", ""), ("slos", "acme")):
        directory.on_change(PolicyChange(table=table, id=row, epoch=2))
    await hard_of(directory)
    assert store.reads == ["acme"]


async def test_a_change_while_it_is_read_is_read_again(directory: QuotaDirectory, store: Store) -> None:
    directory.on_listening()
    store.hold = asyncio.Event()
    asking = asyncio.create_task(hard_of(directory))
    await asyncio.sleep(0.01)
    store.hard = 9
    directory.on_change(PolicyChange(table="quotas", id="acme", epoch=2))
    store.hold.set()
    assert await asking == 9


@pytest.mark.parametrize("turns", range(12))
async def test_f12_who_leaves_in_the_moment_of_the_answer_has_left(
    directory: QuotaDirectory, store: Store, turns: int
) -> None:
    store.hold = asyncio.Event()
    asking = asyncio.create_task(directory.of("acme"))
    while not store.reads:
        await asyncio.sleep(0)
    store.hold.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    if asking.cancel():
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert turns < 11 or not asking.cancelled(), "the last one comes too late"


async def test_f15_known_limits_go_on_without_postgres_and_unknown_ones_are_never_none(
    directory: QuotaDirectory, store: Store, clock: Clock
) -> None:
    directory.on_listening()
    assert await hard_of(directory) == 5
    directory.on_change(PolicyChange(table="quotas", id="acme", epoch=2))
    directory.on_silence()
    store.away = True
    for _ in range(20):
        clock.now += 1.0
        assert await hard_of(directory) == 5  # a change was announced that nobody can tell: the last limits hold
        with pytest.raises(CapacityError) as refused:
            await directory.of("other")
        assert refused.value.code == "policy_unavailable"
    assert len(store.reads) < 20 / cache.RETRY_S * 2
    store.away, store.hard = False, 9
    clock.now += 1.0
    assert await hard_of(directory) == 9
    assert await hard_of(directory, "other") == 9


async def test_a_tenant_that_is_gone_is_not_one_without_limits(directory: QuotaDirectory) -> None:
    with pytest.raises(CapacityError):
        await directory.of("nobody")


async def test_tenants_known_are_bounded(directory: QuotaDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory.cache, "capacity", 3)
    directory.on_listening()
    for number in range(9):
        await hard_of(directory, f"t{number}")
    assert [one.tenant_id for one in directory.known()] == ["t6", "t7", "t8"]


async def test_combinations_kept_at_hand_are_bounded(
    directory: QuotaDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MOST_FOUND", 4)
    tenant = await directory.of("acme")
    for number in range(20):
        assert len(tenant.limits_for(grant(), f"m{number}")) == 1
    assert len(tenant._found) <= 4


async def test_days_begin_in_the_tenants_zone(directory: QuotaDirectory, store: Store) -> None:
    store.zone = "Asia/Tokyo"
    tenant = await directory.of("acme")
    for at in (1_800_000_000.0, 1_800_000_000.0 + 86_400, 1_800_000_000.0):
        start, middle, end = tenant.windows(at).day
        assert start <= at < middle < end
        assert (start + 9 * 3600) % 86_400 == 0


async def test_f15_a_restart_without_postgres_goes_on_with_the_limits_on_disk(
    directory: QuotaDirectory, store: Store, tmp_path: Path
) -> None:
    async def nothing(_: str = "") -> FleetView:
        raise ConnectionRefusedError

    async def no_slos() -> tuple[Slo, ...]:
        raise ConnectionRefusedError

    async def no_grant(_: str) -> KeyGrant | None:
        raise ConnectionRefusedError

    def keeper(directory: QuotaDirectory) -> SnapshotKeeper:
        file = SnapshotFile(tmp_path / "policy.snapshot", "gw", Secret("a session secret that is long enough"))
        keys, fleet = KeyDirectory(no_grant), FleetDirectory(nothing)
        slos = PolicyTable("slos", no_slos, lambda _: None)
        return SnapshotKeeper(file, keys=keys, fleet=fleet, quotas=directory, slos=slos, changed=asyncio.Event())

    directory.on_listening()
    assert await hard_of(directory) == 5
    before = keeper(directory)
    before.save(before.snapshot())
    store.away = True
    again = QuotaDirectory(store.load)
    keeper(again).restore()
    tenant = await again.of("acme")
    assert tenant.quotas == store.quotas("acme", 5)  # prices, too
    with pytest.raises(CapacityError):
        await again.of("other")
    await again.close()


def grant() -> KeyGrant:
    return KeyGrant(
        key_id="k",
        secret_hash=b"",
        tenant_id="acme",
        tenant="acme",
        cache_salt="",
        allowed_models=None,
        revoked=False,
        tenant_active=True,
    )


def test_charges_that_are_kept_are_those_that_are_computed_across_windows_and_raises() -> None:
    day = 86_400
    at = 20_000 * day + day / 2
    raises = (Raise(amount=7, starts_at=at + 10, expires_at=at + 20),)
    kinds = (QuotaKind.TOKENS_PER_DAY, QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.TOKENS_PER_MONTH)
    found = tuple(
        Limit(quota_id=kind, level=QuotaLevel.TENANT, scope_id="t", model="", kind=kind, hard=100, raises=raises)
        for kind in kinds
    )
    tenant = TenantLimits(TenantQuotas(tenant_id="t", tenant="t", time_zone="UTC", limits=found, prices=(), epoch=1))
    seen = set()
    for moment in (at, at + 9.9, at + 10, at + 19.9, at + 20, at + day, at + 40 * day, at + 15, at):
        for use in (Use(input=3, output=4), Use(input=1000)):
            fresh = charges_for("t", found, use, tenant.windows(moment), lambda one, now=moment: effective(one, now))  # type: ignore[misc]  # bound now
            assert tenant.charges(found, use, moment) == fresh
            seen.add((fresh[0].hard, fresh[0].window))
    assert len(seen) == 4
