"""The gateway on real Postgres and Valkey: how fast policy takes hold, and what an outage costs (F15, F16, F19)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from controlplane.db import transaction
from controlplane.fleet.schemas import LOAD_CHANNEL, ReplicaLoad
from controlplane.local.postgres import EmbeddedPostgres
from controlplane.migrate import upgrade
from controlplane.settings import Secret, Settings
from controlplane.tenants import principals, projects
from controlplane.tenants.keys import mint
from controlplane.tenants.schemas import PrincipalKind, PrincipalPatch, PrincipalRole, ProjectPatch
from controlplane.tenants.service import create_key, revoke_key, rotate_key, set_tenant_active
from dataplane.protocol import ReplicaState, encode
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.deployment import Accounts, Deployed, deployed_gateway, until
from tests.controlplane.gateway.replicas import FakeReplica, fake_replica
from tests.services import free_port, service_folder


@pytest.fixture
async def accounts(settings: Settings) -> AsyncIterator[Accounts]:
    accounts = Accounts(settings)
    await accounts.tenant("acme")
    await accounts.pool("pool-m", "m")
    yield accounts
    await accounts.close()


@pytest.fixture
async def replica(accounts: Accounts) -> AsyncIterator[FakeReplica]:
    async with fake_replica() as running:
        await accounts.replica("r0", "pool-m", running.url)
        yield running


@pytest.fixture
async def gateway(settings: Settings, replica: FakeReplica) -> AsyncIterator[Deployed]:
    async with deployed_gateway(settings) as running:
        yield running


def key_id(key: str) -> str:
    return key.split("_")[1]


async def test_f16_a_revoked_key_is_refused_within_two_seconds(gateway: Deployed, accounts: Accounts) -> None:
    key = await accounts.key("acme")
    assert await gateway.status(key) == (200, "")
    async with transaction(accounts.engine) as session:
        await revoke_key(session, key_id(key))
    revoked_at = time.monotonic()
    while await gateway.status(key) == (200, ""):
        await asyncio.sleep(0.01)
    assert time.monotonic() - revoked_at < 2.0
    assert await gateway.status(key) == (401, "api_key_revoked")


@pytest.mark.parametrize("level", ["tenant", "project", "principal"])
async def test_f16_what_was_made_inactive_is_refused_within_two_seconds_and_served_again(
    gateway: Deployed, accounts: Accounts, level: str
) -> None:
    async with transaction(accounts.engine) as session:
        await projects.create_project(session, "acme", slug="search", name="S")
        owner = await principals.create_principal(
            session, "acme", kind=PrincipalKind.SERVICE_ACCOUNT, name="bot", role=PrincipalRole.MEMBER
        )
        made = await create_key(session, tenant_slug="acme", name="theirs", project="search", principal_id=owner.id)
    key, other = made.plain.reveal(), await accounts.key("acme")
    assert await gateway.status(key) == (200, "")
    for active, expected in ((False, (403, f"{level}_inactive")), (True, (200, ""))):
        async with transaction(accounts.engine) as session:
            if level == "tenant":
                await set_tenant_active(session, "acme", active)
            elif level == "project":
                await projects.change_project(session, "acme", "search", ProjectPatch(active=active))
            else:
                await principals.change_principal(session, "acme", owner.id, PrincipalPatch(active=active))
        async with asyncio.timeout(2.0):
            while await gateway.status(key) != expected:
                await asyncio.sleep(0.01)
        assert await gateway.status(other) == (expected if level == "tenant" else (200, ""))


async def test_f16_a_role_taken_away_takes_its_scopes_within_two_seconds(gateway: Deployed, accounts: Accounts) -> None:
    async with transaction(accounts.engine) as session:
        owner = await principals.create_principal(
            session, "acme", kind=PrincipalKind.SERVICE_ACCOUNT, name="bot", role=PrincipalRole.MEMBER
        )
        made = await create_key(session, tenant_slug="acme", name="theirs", principal_id=owner.id)
    key = made.plain.reveal()
    assert await gateway.status(key) == (200, "")
    for role, expected in ((PrincipalRole.VIEWER, (403, "scope_missing")), (PrincipalRole.ADMIN, (200, ""))):
        async with transaction(accounts.engine) as session:
            await principals.change_principal(session, "acme", owner.id, PrincipalPatch(role=role))
        async with asyncio.timeout(2.0):
            while await gateway.status(key) != expected:
                await asyncio.sleep(0.01)


async def test_f10_both_keys_of_a_rotation_are_served_in_grace_and_only_the_new_one_after(
    gateway: Deployed, accounts: Accounts
) -> None:
    old = await accounts.key("acme")
    assert await gateway.status(old) == (200, "")
    async with transaction(accounts.engine) as session:
        new = (await rotate_key(session, key_id(old), grace_s=2)).plain.reveal()
    assert await gateway.status(new) == (200, "")
    assert await gateway.status(old) == (200, "")
    async with asyncio.timeout(4.0):
        while await gateway.status(old) != (401, "api_key_expired"):
            await asyncio.sleep(0.01)
    assert await gateway.status(new) == (200, "")
    identities = {grant.key_id: grant.identity for grant in gateway.gateway.keys.known()}
    assert identities[key_id(new)] == identities[key_id(old)] == key_id(old)


async def test_a_new_key_a_new_pool_and_a_new_replica_work_at_once(gateway: Deployed, accounts: Accounts) -> None:
    await accounts.tenant("late")
    key = await accounts.key("late")
    assert await gateway.status(key) == (200, "")
    assert await gateway.status(key, model="new") == (404, "model_not_found")
    await accounts.pool("pool-new", "new")
    async with asyncio.timeout(2.0):
        while await gateway.status(key, model="new") != (503, "no_capacity"):
            await asyncio.sleep(0.01)
    async with fake_replica() as second:
        await accounts.replica("r-new", "pool-new", second.url)
        async with asyncio.timeout(2.0):
            while await gateway.status(key, model="new") != (200, ""):
                await asyncio.sleep(0.01)
        assert len(second.seen) == 1


async def test_f19_states_change_where_requests_go(gateway: Deployed, accounts: Accounts) -> None:
    key = await accounts.key("acme")
    async with fake_replica() as other:
        await accounts.replica("r1", "pool-m", other.url, ReplicaState.STALE)
        await until(lambda: len(gateway.gateway.fleet.replicas("m")) == 2)
        for _ in range(5):
            await gateway.status(key)
        assert other.seen == []
        await accounts.replica("r0", "pool-m", "http://127.0.0.1:1", ReplicaState.LOST)
        await until(lambda: gateway.gateway.fleet.replicas("m")[0].state is ReplicaState.LOST)
        assert await gateway.status(key) == (200, "")
        assert len(other.seen) == 1


async def test_reported_load_is_heard_and_moves_requests(gateway: Deployed, accounts: Accounts, redis: Redis) -> None:
    key = await accounts.key("acme")
    board = gateway.gateway.board
    async with fake_replica() as other:
        await accounts.replica("r1", "pool-m", other.url)
        await until(lambda: len(gateway.gateway.fleet.replicas("m")) == 2)
        busy = ReplicaLoad(
            replica="r0", at=time.time(), state=ReplicaState.READY, running=40, waiting=2, blocks_free=1, blocks_total=9
        )
        async with asyncio.timeout(10):
            while not any(c.others == 42 for c in board.candidates(gateway.gateway.fleet.replicas("m"))):
                await redis.publish(LOAD_CHANNEL, encode(busy))
                await redis.publish(LOAD_CHANNEL, b"junk")
                await redis.publish(LOAD_CHANNEL, encode(msgspec.structs.replace(busy, replica="nobody")))
                await asyncio.sleep(0.02)
        for _ in range(8):
            await gateway.status(key)
        assert len(other.seen) == 8
        assert board.in_flight("nobody") == 0


async def test_f19_without_redis_requests_go_on_by_own_counts(settings: Settings, accounts: Accounts) -> None:
    away = msgspec.structs.replace(settings, redis_url=Secret("redis://127.0.0.1:1/0"))
    async with fake_replica() as replica:
        await accounts.replica("r0", "pool-m", replica.url)
        key = await accounts.key("acme")
        async with deployed_gateway(away) as gateway:
            for _ in range(5):
                assert await gateway.status(key) == (200, "")


async def test_metrics_and_health_are_served_beside_v1(gateway: Deployed, accounts: Accounts) -> None:
    key = await accounts.key("acme")
    await gateway.status(key)
    await gateway.status("tg_junk")
    await gateway.status(key, model="junk-model-name")
    exposed = await gateway.metrics()
    assert 'tidegate_gateway_requests_total{model="m",status="2xx",tenant="acme"} 1.0' in exposed
    assert 'tidegate_gateway_requests_total{model="other",status="4xx",tenant="other"} 1.0' in exposed
    assert 'tidegate_gateway_requests_total{model="other",status="4xx",tenant="acme"} 1.0' in exposed
    assert "tidegate_gateway_in_flight 0.0" in exposed
    assert "junk-model-name" not in exposed
    assert 'tidegate_gateway_tokens_total{kind="cached",model="m",tenant="acme"} 8.0' in exposed


async def test_an_answer_has_one_request_id_that_the_replica_got_too(
    gateway: Deployed, accounts: Accounts, replica: FakeReplica
) -> None:
    headers = {"authorization": f"Bearer {await accounts.key('acme')}", "x-request-id": "mine-1"}
    body = b'{"model":"m","messages":[]}'
    async with gateway.client.post(gateway.url + "/v1/chat/completions", data=body, headers=headers) as response:
        assert response.headers.getall("x-request-id") == ["mine-1"]
    assert replica.seen[-1].headers["x-request-id"] == "mine-1"


async def test_f15_postgres_stopped_costs_no_401_and_known_keys_are_served_also_after_a_restart(
    settings: Settings, valkey: str
) -> None:
    """Postgres stops under load; the gateway serves on, is restarted without Postgres, and hears it come back."""
    with service_folder("f15") as folder:
        server = EmbeddedPostgres(folder / "data", free_port(), options={"fsync": "off"})
        server.start()
        try:
            upgrade(Secret(server.url))
            own = msgspec.structs.replace(settings, database_url=Secret(server.url))
            accounts = Accounts(own)
            await accounts.tenant("acme")
            await accounts.pool("pool-m", "m")
            used, unused = await accounts.key("acme"), await accounts.key("acme")
            async with fake_replica() as replica:
                await accounts.replica("r0", "pool-m", replica.url)
                async with deployed_gateway(own) as gateway:
                    assert await gateway.status(used) == (200, "")
                    await until(lambda: len(gateway.gateway.keys.known()) == 2)
                    answers: list[tuple[int, str]] = []
                    stop = asyncio.Event()

                    async def load() -> None:
                        while not stop.is_set():
                            answers.append(await gateway.status(used))
                            await asyncio.sleep(0.01)

                    loading = asyncio.create_task(load())
                    await asyncio.to_thread(server.stop)
                    await until(lambda: not gateway.gateway.fleet.listening)
                    await asyncio.sleep(2.5)
                    stop.set()
                    await loading
                    assert set(answers) == {(200, "")}
                    assert await gateway.status(unused) == (200, "")  # read ahead when the gateway started
                    stranger = strangers_key()
                    assert await gateway.status(stranger) == (503, "policy_unavailable")
                async with deployed_gateway(own) as again:
                    assert await again.status(used) == (200, "")
                    assert await again.status(unused) == (200, "")
                    assert await again.status(stranger) == (503, "policy_unavailable")
                    server.start()
                    await until(lambda: again.gateway.fleet.listening)
                    async with asyncio.timeout(5):
                        while await again.status(stranger) != (401, "invalid_api_key"):
                            await asyncio.sleep(0.05)
                    async with transaction(accounts.engine) as session:
                        await revoke_key(session, key_id(used))
                    async with asyncio.timeout(2):
                        while await again.status(used) != (401, "api_key_revoked"):
                            await asyncio.sleep(0.01)
            await accounts.close()
        finally:
            server.stop()


def strangers_key() -> str:
    """A well-formed key that nobody issued."""
    return mint().plain.reveal()


async def test_the_lifespan_leaves_no_task_behind(settings: Settings, accounts: Accounts) -> None:
    async with fake_replica(replicas.stream_forever) as replica:
        await accounts.replica("r0", "pool-m", replica.url)
        async with deployed_gateway(settings) as gateway:
            assert [t for t in asyncio.all_tasks() if t.get_name().startswith("gateway ")]
            async with gateway.client.get(gateway.url + "/v1/models") as answer:
                assert answer.status == 401
    left = [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("gateway ")]
    assert left == []


async def test_f16_a_listening_connection_that_dies_is_replaced_and_nothing_is_missed(
    gateway: Deployed, accounts: Accounts
) -> None:
    keys = [await accounts.key("acme") for _ in range(3)]
    for key in keys:
        assert await gateway.status(key) == (200, "")
        async with transaction(accounts.engine) as session:
            await session.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name"),
                {"name": "tidegate gateway policy"},
            )
            await revoke_key(session, key_id(key))
        async with asyncio.timeout(2.0):
            while await gateway.status(key) != (401, "api_key_revoked"):
                await asyncio.sleep(0.01)
    await until(lambda: gateway.gateway.fleet.listening)
