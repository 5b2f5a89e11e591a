"""The policy on disk: whole, signed, private, and never believed when it should not be."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import msgspec
import pytest

from controlplane.fleet.schemas import FleetView, PoolRoute, ReplicaRoute
from controlplane.gateway import snapshot as module
from controlplane.gateway.auth import KeyDirectory
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.policy import PolicyChange
from controlplane.gateway.quotas import QuotaDirectory
from controlplane.gateway.snapshot import MAGIC, PolicySnapshot, SnapshotFile, SnapshotKeeper, SnapshotRefusedError
from controlplane.gateway.table import PolicyTable
from controlplane.quotas.schemas import TenantQuotas
from controlplane.settings import Secret
from controlplane.slo.schemas import Slo
from controlplane.tenants.keys import mint
from controlplane.tenants.schemas import KeyGrant
from dataplane.protocol import ReplicaState

SECRET = Secret("a session secret that is long enough")


def grant(**fields: object) -> tuple[str, KeyGrant]:
    minted = mint()
    values: dict[str, object] = {
        "key_id": minted.key_id,
        "secret_hash": minted.secret_hash,
        "tenant_id": "t",
        "tenant": "acme",
        "cache_salt": "salt",
        "allowed_models": ("m",),
        "revoked": False,
        "tenant_active": True,
    }
    return minted.plain.reveal(), KeyGrant(**{**values, **fields})


def view(epoch: int = 5) -> FleetView:
    pool = PoolRoute(name="p", model="m", backend="native", created_at=1.0)
    replica = ReplicaRoute(replica="r0", pool="p", url="http://127.0.0.1:1", state=ReplicaState.READY, boot_epoch=1)
    return FleetView(epoch=epoch, pools=[pool], replicas=[replica])


def made(epoch: int = 5, **fields: object) -> PolicySnapshot:
    values: dict[str, object] = {"gateway": "gw", "written_at": 1.0, "grants": [grant()[1]], "fleet": view(epoch)}
    return PolicySnapshot(epoch=epoch, **{**values, **fields})


@pytest.fixture
def file(tmp_path: Path) -> SnapshotFile:
    return SnapshotFile(tmp_path / "gateway" / "gw" / "policy.snapshot", "gw", SECRET)


def test_what_was_written_is_read_back_and_private(file: SnapshotFile) -> None:
    written = made()
    file.save(written)
    assert SnapshotFile(file.path, "gw", SECRET).load() == written
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert [p.name for p in file.path.parent.iterdir()] == ["policy.snapshot"]


def test_no_file_is_no_snapshot(file: SnapshotFile) -> None:
    assert file.load() is None


def test_every_changed_byte_is_noticed(file: SnapshotFile) -> None:
    file.save(made())
    good = file.path.read_bytes()
    for i in range(len(good)):
        file.path.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        with pytest.raises(SnapshotRefusedError):
            SnapshotFile(file.path, "gw", SECRET).load()
    for cut in (0, 5, len(MAGIC), len(MAGIC) + 31, len(good) - 1):
        file.path.write_bytes(good[:cut])
        with pytest.raises(SnapshotRefusedError):
            SnapshotFile(file.path, "gw", SECRET).load()


def test_another_secret_another_gateway_and_an_older_epoch_are_refused(file: SnapshotFile) -> None:
    file.save(made(epoch=5))
    with pytest.raises(SnapshotRefusedError, match="signature"):
        SnapshotFile(file.path, "gw", Secret("another secret")).load()
    with pytest.raises(SnapshotRefusedError, match="another gateway"):
        SnapshotFile(file.path, "gw-2", SECRET).load()
    with pytest.raises(SnapshotRefusedError, match="newer"):
        SnapshotFile(file.path, "gw", SECRET).load(not_before=6)
    old = file.path.read_bytes()
    file.save(made(epoch=9))
    file.path.write_bytes(old)
    with pytest.raises(SnapshotRefusedError, match="newer"):
        file.load()


def test_a_write_that_fails_leaves_the_old_file(file: SnapshotFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.save(made(epoch=5))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        file.save(made(epoch=6))
    monkeypatch.undo()
    loaded = file.load()
    assert loaded is not None
    assert loaded.epoch == 5
    assert len(list(file.path.parent.iterdir())) == 1


class Away:
    """Postgres that cannot be reached, and counts who asks."""

    async def grant(self, key_id: str) -> KeyGrant | None:
        raise ConnectionRefusedError

    async def fleet(self) -> FleetView:
        raise ConnectionRefusedError

    async def quotas(self, tenant_id: str) -> TenantQuotas | None:
        raise ConnectionRefusedError

    async def slos(self) -> tuple[Slo, ...]:
        raise ConnectionRefusedError


def keeper_of(file: SnapshotFile, keys: KeyDirectory, fleet: FleetDirectory) -> SnapshotKeeper:
    quotas, slos = QuotaDirectory(Away().quotas), PolicyTable("slos", Away().slos, lambda _: None)
    return SnapshotKeeper(file, keys=keys, fleet=fleet, quotas=quotas, slos=slos, changed=asyncio.Event())


async def test_objectives_outlive_a_restart_without_postgres(file: SnapshotFile) -> None:
    promise = Slo(
        slo_id="s", tenant_id="t", pool="p", service_class="", ttft_ms=500, ttft_share=0.9, tpot_ms=None,
        tpot_share=None, availability=None, window_days=30,
    )  # fmt: skip
    changed, in_force = asyncio.Event(), []

    async def load() -> tuple[Slo, ...]:
        return (promise,)

    def keeper(slos: PolicyTable[tuple[Slo, ...]]) -> SnapshotKeeper:
        keys, fleet = KeyDirectory(Away().grant), FleetDirectory(Away().fleet)
        quotas = QuotaDirectory(Away().quotas)
        return SnapshotKeeper(file, keys=keys, fleet=fleet, quotas=quotas, slos=slos, changed=changed)

    before = PolicyTable("slos", load, lambda _: None, changed.set)
    assert await before.refresh()
    assert changed.is_set(), "what was learned is to be written"
    changed.clear()
    assert await before.refresh()
    assert not changed.is_set(), "and what is as before is not"
    written = keeper(before)
    written.save(written.snapshot())
    after = PolicyTable("slos", Away().slos, in_force.append, changed.set)
    keeper(after).restore()
    assert in_force == [(promise,)]
    assert not await after.refresh()
    assert in_force == [(promise,)]


async def test_a_gateway_starts_from_the_file_and_serves_known_keys_without_postgres(file: SnapshotFile) -> None:
    key, known = grant()
    file.save(made(grants=[known]))
    keys, fleet = KeyDirectory(Away().grant), FleetDirectory(Away().fleet)
    keeper_of(SnapshotFile(file.path, "gw", SECRET), keys, fleet).restore()
    assert await keys.authenticate(f"Bearer {key}") == known
    assert fleet.pool("m") is not None
    assert [route.replica for route in fleet.replicas("m")] == ["r0"]
    assert not await fleet.refresh()
    assert fleet.view == view()  # F19: an outage never takes the last view away
    await keys.close()


async def test_a_refused_file_is_left_alone_and_said_so(file: SnapshotFile, caplog: pytest.LogCaptureFixture) -> None:
    file.save(made())
    file.path.write_bytes(file.path.read_bytes()[:-1])
    keys, fleet = KeyDirectory(Away().grant), FleetDirectory(Away().fleet)
    keeper_of(file, keys, fleet).restore()
    assert keys.known() == []
    assert fleet.view is None
    assert "signature" in caplog.text
    assert file.path.exists()


async def test_the_keeper_writes_after_a_change_and_drops_what_was_revoked(
    file: SnapshotFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY_S", 0.01)
    kept, gone = grant()[1], grant()[1]
    store = {kept.key_id: kept, gone.key_id: gone}

    async def load(key_id: str) -> KeyGrant | None:
        return store.get(key_id)

    async def load_fleet() -> FleetView:
        return view(8)

    async def load_quotas(tenant_id: str) -> TenantQuotas | None:
        return None

    changed = asyncio.Event()
    keys, fleet = KeyDirectory(load, on_learned=changed.set), FleetDirectory(load_fleet, lambda _: changed.set())
    keys.on_listening()
    quotas, slos = QuotaDirectory(load_quotas), PolicyTable("slos", Away().slos, lambda _: None)
    keeper = SnapshotKeeper(file, keys=keys, fleet=fleet, quotas=quotas, slos=slos, changed=changed)
    running = asyncio.create_task(keeper.run())
    await fleet.refresh()
    keys.adopt(store.values())
    changed.set()

    async def on_disk(expected: set[str]) -> None:
        async with asyncio.timeout(5):
            while True:
                loaded = SnapshotFile(file.path, "gw", SECRET).load() if file.path.exists() else None
                if loaded and loaded.epoch == 8 and {g.key_id for g in loaded.grants} == expected:
                    return
                await asyncio.sleep(0.01)

    await on_disk({kept.key_id, gone.key_id})
    store[gone.key_id] = msgspec.structs.replace(gone, revoked=True)
    keys.on_change(PolicyChange(table="api_keys", id=gone.key_id, epoch=9))
    await on_disk({kept.key_id})
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await keys.close()


async def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    file = SnapshotFile(blocked / "policy.snapshot", "gw", SECRET)
    keeper = keeper_of(file, KeyDirectory(Away().grant), FleetDirectory(Away().fleet))
    for _ in range(3):
        keeper.save(made())
    assert caplog.text.count("cannot be written") == 1
