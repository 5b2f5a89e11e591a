"""A revoked key is refused everywhere within two seconds: each path, each role, each gateway (F16)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from msgspec import structs

from controlplane.db import transaction
from controlplane.gateway.paths import INFERENCE, MODELS
from controlplane.settings import Settings
from controlplane.tenants import principals
from controlplane.tenants.schemas import ROLE_SCOPES, PrincipalKind, PrincipalRole, Scope
from controlplane.tenants.service import create_key, revoke_key
from tests.controlplane.gateway.deployment import Accounts, Deployed, deployed_gateway
from tests.controlplane.gateway.harness import CHAT
from tests.controlplane.gateway.replicas import fake_replica

PATHS = [("POST", path) for path in INFERENCE] + [("GET", MODELS), ("GET", f"{MODELS}/m")]
WITHIN_S = 2.0
REVOKED = (401, "api_key_revoked")


@dataclass
class Two:
    """Two gateways of one deployment."""

    accounts: Accounts
    gateways: tuple[Deployed, Deployed]

    async def key(self, role: PrincipalRole | None) -> str:
        """A key with all that its owner's role may have; without an owner, with everything."""
        async with transaction(self.accounts.engine) as session:
            owner = role and await principals.create_principal(
                session, "acme", kind=PrincipalKind.SERVICE_ACCOUNT, name=role.value, role=role
            )
            scopes = list(ROLE_SCOPES[role]) if role else list(Scope)
            made = await create_key(
                session, tenant_slug="acme", name="k", scopes=scopes, principal_id=owner.id if owner else None
            )
        return made.plain.reveal()


@pytest.fixture
async def two(settings: Settings) -> AsyncIterator[Two]:
    accounts = Accounts(settings)
    await accounts.tenant("acme")
    await accounts.pool("pool-m", "m")
    async with fake_replica() as replica:
        await accounts.replica("r0", "pool-m", replica.url)
        other = structs.replace(settings, gateway_id="gateway-1")
        async with deployed_gateway(settings) as one, deployed_gateway(other) as two:
            yield Two(accounts, (one, two))
    await accounts.close()


async def answer(gateway: Deployed, key: str, method: str, path: str) -> tuple[int, str]:
    headers = {"authorization": f"Bearer {key}"}
    body = {**CHAT, "prompt": "hi"} if method == "POST" else None
    async with gateway.client.request(method, f"{gateway.url}/v1{path}", json=body, headers=headers) as response:
        said = await response.json()
        return response.status, str(said["error"]["code"]) if "error" in said else ""


@pytest.mark.parametrize("role", [None, *PrincipalRole], ids=lambda role: role.value if role else "no owner")
async def test_f16_a_revoked_key_is_refused_on_every_path_of_every_gateway(
    two: Two, role: PrincipalRole | None
) -> None:
    key = await two.key(role)
    asked = [(gateway, method, path) for gateway in two.gateways for method, path in PATHS]
    infers = role is None or Scope.INFERENCE in ROLE_SCOPES[role]
    for gateway, method, path in asked:
        expected = (200, "") if method == "GET" or infers else (403, "scope_missing")
        assert await answer(gateway, key, method, path) == expected, path
    async with transaction(two.accounts.engine) as session:
        await revoke_key(session, key.split("_")[1])
    revoked_at = time.monotonic()

    async def took(gateway: Deployed, method: str, path: str) -> float:
        while await answer(gateway, key, method, path) != REVOKED:
            assert time.monotonic() - revoked_at < WITHIN_S, (path, role)
            await asyncio.sleep(0.01)
        return time.monotonic() - revoked_at

    assert max(await asyncio.gather(*(took(*each) for each in asked))) < WITHIN_S
    for each in asked:
        assert await answer(each[0], key, *each[1:]) == REVOKED
