"""How long a grant may be believed, and what junk keys may cost (F15, F16)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from controlplane.errors import AuthenticationError, CapacityError, PermissionDeniedError, TidegateError
from controlplane.gateway import auth, cache
from controlplane.gateway.auth import KeyDirectory
from controlplane.gateway.policy import PolicyChange
from controlplane.tenants.keys import mint
from controlplane.tenants.schemas import KeyGrant


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Store:
    """Postgres as the directory sees it. `hold` makes reads wait, `away` makes them fail."""

    def __init__(self) -> None:
        self.grants: dict[str, KeyGrant] = {}
        self.reads: list[str] = []
        self.away = False
        self.hold: asyncio.Event | None = None
        self.at_once = self.most_at_once = 0

    def key(self, **fields: object) -> str:
        minted = mint()
        values: dict[str, object] = {
            "secret_hash": minted.secret_hash,
            "tenant_id": "t1",
            "tenant": "acme",
            "cache_salt": "s",
            "allowed_models": None,
            "revoked": False,
            "tenant_active": True,
        }
        self.grants[minted.key_id] = KeyGrant(key_id=minted.key_id, **{**values, **fields})
        return minted.plain.reveal()

    def set(self, key: str, **fields: object) -> None:
        key_id = id_of(key)
        self.grants[key_id] = msgspec.structs.replace(self.grants[key_id], **fields)

    async def load(self, key_id: str) -> KeyGrant | None:
        self.reads.append(key_id)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            grant = self.grants.get(key_id)
            await asyncio.sleep(0)
            if self.hold is not None:
                await self.hold.wait()
            if self.away:
                raise ConnectionRefusedError
            return grant
        finally:
            self.at_once -= 1


def id_of(key: str) -> str:
    return key.split("_")[1]


def junk() -> str:
    """A well-formed key that nobody issued."""
    return mint().plain.reveal()


def changed(key: str, epoch: int = 2) -> PolicyChange:
    return PolicyChange(table="api_keys", id=id_of(key), epoch=epoch)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
async def keys(store: Store, clock: Clock) -> AsyncIterator[KeyDirectory]:
    directory = KeyDirectory(store.load, clock=clock, wall=clock)
    yield directory
    await directory.close()


async def outcome(keys: KeyDirectory, key: str) -> str:
    """The tenant, or the refusal's code."""
    try:
        return (await keys.authenticate(f"Bearer {key}")).tenant
    except TidegateError as error:
        return error.code


async def test_a_grant_is_read_once_while_listening(keys: KeyDirectory, store: Store, clock: Clock) -> None:
    keys.on_listening()
    key = store.key()
    for _ in range(50):
        assert await outcome(keys, key) == "acme"
        clock.now += 60.0
    assert len(store.reads) == 1


async def test_f16_a_revocation_that_is_announced_counts_with_the_next_request(
    keys: KeyDirectory, store: Store
) -> None:
    keys.on_listening()
    key = store.key()
    assert await outcome(keys, key) == "acme"
    store.set(key, revoked=True)
    assert await outcome(keys, key) == "acme"  # nobody has told yet
    keys.on_change(changed(key))
    assert await outcome(keys, key) == "api_key_revoked"


async def test_f16_while_nobody_would_tell_a_grant_older_than_a_second_is_read_again(
    keys: KeyDirectory, store: Store, clock: Clock
) -> None:
    key = store.key()
    assert await outcome(keys, key) == "acme"
    store.set(key, revoked=True)
    clock.now += cache.MAX_AGE_S
    assert await outcome(keys, key) == "acme"
    clock.now += 0.01
    assert await outcome(keys, key) == "api_key_revoked"


async def test_f16_a_revocation_missed_while_not_listening_is_found_on_listening_again(
    keys: KeyDirectory, store: Store
) -> None:
    keys.on_listening()
    key = store.key()
    assert await outcome(keys, key) == "acme"
    keys.on_silence()
    store.set(key, revoked=True)
    keys.on_listening()
    assert await outcome(keys, key) == "api_key_revoked"


async def test_f16_a_revocation_during_the_very_read_is_not_lost(keys: KeyDirectory, store: Store) -> None:
    keys.on_listening()
    key = store.key()
    store.hold = asyncio.Event()
    asking = asyncio.create_task(outcome(keys, key))
    while not store.reads:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    store.set(key, revoked=True)
    keys.on_change(changed(key))
    store.hold.set()
    assert await asking == "api_key_revoked"
    assert len(store.reads) == 2


async def test_f16_deactivating_a_tenant_ends_all_its_keys(keys: KeyDirectory, store: Store) -> None:
    keys.on_listening()
    mine = [store.key() for _ in range(3)]
    other = store.key(tenant="other", tenant_id="t2")
    for key in [*mine, other]:
        await outcome(keys, key)
    for key in mine:
        store.set(key, tenant_active=False)
    keys.on_change(PolicyChange(table="tenants", id="t1", epoch=3))
    assert [await outcome(keys, key) for key in mine] == ["tenant_inactive"] * 3
    reads = len(store.reads)
    assert await outcome(keys, other) == "other"
    assert len(store.reads) == reads


async def test_a_change_of_any_row_rereads_everything(keys: KeyDirectory, store: Store) -> None:
    keys.on_listening()
    key = store.key()
    await outcome(keys, key)
    store.grants.clear()
    keys.on_change(PolicyChange(table="api_keys", id="", epoch=3))
    assert await outcome(keys, key) == "invalid_api_key"


async def test_f15_postgres_away_known_keys_go_on_and_unknown_ones_get_503_never_401(
    keys: KeyDirectory, store: Store, clock: Clock
) -> None:
    keys.on_listening()
    known = store.key()
    unknown = store.key()
    assert await outcome(keys, known) == "acme"
    store.away = True
    keys.on_silence()
    for _ in range(120):
        clock.now += 0.5
        assert await outcome(keys, known) == "acme"
        assert await outcome(keys, unknown) == "policy_unavailable"
        assert await outcome(keys, junk()) == "policy_unavailable"
    with pytest.raises(CapacityError) as refused:
        await keys.authenticate(f"Bearer {unknown}")
    assert int(refused.value.headers["retry-after"]) >= 1
    # an outage is asked about, not hammered: about one read for each RETRY_S
    assert len(store.reads) < 120 * 0.5 / cache.RETRY_S * 2
    store.away = False
    clock.now += 1.0
    assert await outcome(keys, unknown) == "acme"


async def test_f15_a_postgres_that_hangs_holds_up_a_known_key_only_briefly(
    keys: KeyDirectory, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KNOWN_WAIT_S", 0.05)
    key = store.key()
    assert await outcome(keys, key) == "acme"
    store.hold = asyncio.Event()
    clock.now += 2.0
    assert await outcome(keys, key) == "acme"
    reads = len(store.reads)
    for _ in range(10):
        assert await outcome(keys, key) == "acme"
    assert len(store.reads) == reads  # nobody waits again until the pause is over
    store.set(key, revoked=True)
    store.hold.set()


async def test_a_key_known_to_have_changed_is_not_believed_when_postgres_fails(
    keys: KeyDirectory, store: Store
) -> None:
    keys.on_listening()
    key = store.key()
    await outcome(keys, key)
    keys.on_change(changed(key))
    store.away = True
    assert await outcome(keys, key) == "policy_unavailable"


async def test_keys_of_an_earlier_run_serve_only_while_postgres_is_away(
    keys: KeyDirectory, store: Store, clock: Clock
) -> None:
    key, revoked = store.key(), store.key()
    keys.adopt(list(store.grants.values()))
    store.set(revoked, revoked=True)
    store.away = True
    assert await outcome(keys, key) == "acme"
    assert await outcome(keys, revoked) == "acme"
    store.away = False
    clock.now += 1.0
    assert await outcome(keys, revoked) == "api_key_revoked"


async def test_one_read_serves_all_who_ask_for_a_key_at_once(keys: KeyDirectory, store: Store) -> None:
    key = store.key()
    assert set(await asyncio.gather(*(outcome(keys, key) for _ in range(200)))) == {"acme"}
    assert len(store.reads) == 1


async def test_a_client_that_leaves_does_not_end_the_read_others_wait_for(keys: KeyDirectory, store: Store) -> None:
    key = store.key()
    store.hold = asyncio.Event()
    first, second = asyncio.create_task(outcome(keys, key)), asyncio.create_task(outcome(keys, key))
    while not store.reads:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    store.hold.set()
    assert await second == "acme"


async def test_a_malformed_or_mistyped_key_costs_no_read(keys: KeyDirectory, store: Store) -> None:
    key = store.key()
    for text in ("", "x", key[:-1], key[:-1] + ("0" if key[-1] != "0" else "1"), key.upper(), key + "x"):
        assert await outcome(keys, text) == "invalid_api_key"
    assert store.reads == []


async def test_a_wrong_secret_for_a_known_key_costs_no_read(keys: KeyDirectory, store: Store) -> None:
    keys.on_listening()
    real = store.key()
    await outcome(keys, real)
    guess = msgspec.structs.replace(store.grants[id_of(real)], secret_hash=b"0" * 32)
    store.grants[id_of(real)] = guess
    keys.on_change(changed(real))
    for _ in range(20):
        assert await outcome(keys, real) == "invalid_api_key"
    assert len(store.reads) == 2


async def test_the_same_junk_key_is_looked_up_once(keys: KeyDirectory, store: Store) -> None:
    keys.on_listening()
    stranger = junk()
    assert {await outcome(keys, stranger) for _ in range(50)} == {"invalid_api_key"}
    assert len(store.reads) == 1


async def test_a_key_created_after_it_was_asked_for_works_once_announced(keys: KeyDirectory, store: Store) -> None:
    keys.on_listening()
    key = store.key()
    grant = store.grants.pop(id_of(key))
    assert await outcome(keys, key) == "invalid_api_key"
    store.grants[grant.key_id] = grant
    keys.on_change(changed(key))
    assert await outcome(keys, key) == "acme"


async def test_junk_keys_are_rationed_and_cost_known_keys_nothing(
    keys: KeyDirectory, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys.cache, "capacity", 100)
    keys.on_listening()
    known = store.key()
    assert await outcome(keys, known) == "acme"
    answers = [await outcome(keys, junk()) for _ in range(int(auth.UNKNOWN_BURST) + 200)]
    assert answers.count("key_lookups_busy") >= 195
    assert "acme" not in answers
    assert len(store.reads) <= auth.UNKNOWN_BURST + 1
    assert len(keys.cache._absent) <= 100
    assert await outcome(keys, known) == "acme"
    clock.now += 1.0
    reads = len(store.reads)
    for _ in range(300):
        await outcome(keys, junk())
    assert len(store.reads) - reads <= auth.UNKNOWN_PER_S + 1
    assert await outcome(keys, store.key()) == "key_lookups_busy"
    clock.now += 1.0
    assert await outcome(keys, store.key()) == "acme"


async def test_real_keys_do_not_use_up_the_ration(keys: KeyDirectory, store: Store) -> None:
    keys.on_listening()
    for _ in range(int(auth.UNKNOWN_BURST) * 2):
        assert await outcome(keys, store.key()) == "acme"


async def test_reads_at_once_and_waiting_are_bounded(keys: KeyDirectory, store: Store) -> None:
    keys.on_listening()
    store.hold = asyncio.Event()
    asking = [asyncio.create_task(outcome(keys, store.key())) for _ in range(400)]
    await asyncio.sleep(0.05)
    store.hold.set()
    answers = await asyncio.gather(*asking)
    assert store.most_at_once <= cache.READS_AT_ONCE
    assert answers.count("acme") == cache.READS_WAITING
    assert answers.count("key_lookups_busy") == 400 - cache.READS_WAITING


async def test_the_cache_of_known_keys_is_bounded_and_keeps_the_recent(
    keys: KeyDirectory, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys.cache, "capacity", 10)
    keys.on_listening()
    texts = [store.key() for _ in range(12)]
    for text in texts:
        await outcome(keys, texts[0])
        await outcome(keys, text)
    known = {grant.key_id for grant in keys.known()}
    assert len(known) == 10
    assert id_of(texts[0]) in known


async def test_messages_never_hold_the_key(keys: KeyDirectory, store: Store) -> None:
    texts = [store.key(revoked=True), junk(), "tg_" + "s" * 60, store.key(tenant_active=False)]
    for text in texts:
        with pytest.raises((AuthenticationError, PermissionDeniedError)) as refused:
            await keys.authenticate(f"Bearer {text}")
        assert text not in str(refused.value)
        assert text[-20:] not in str(refused.value)
