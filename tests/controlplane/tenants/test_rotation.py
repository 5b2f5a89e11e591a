"""Rotating keys on real Postgres (F10): identity survives, both are valid in grace, a repeat makes no second one."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import transaction
from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.tenants import keys, principals, projects, service
from controlplane.tenants.schemas import KeyGrant, KeyView, PrincipalKind, PrincipalRole, Scope
from tests.factories.rows import make_key, make_tenant

DAY_S = 86_400


async def grant_of(session: AsyncSession, key_id: str) -> KeyGrant:
    grant = await service.load_key(session, key_id)
    assert grant is not None
    return grant


async def full_key(session: AsyncSession, **values: object) -> KeyView:
    """A key with everything a key can have."""
    await make_tenant(session, "acme")
    await projects.create_project(session, "acme", slug="search", name="S")
    owner = await principals.create_principal(
        session, "acme", kind=PrincipalKind.SERVICE_ACCOUNT, name="bot", role=PrincipalRole.MEMBER
    )
    made = await make_key(
        session,
        "acme",
        **{
            "project": "search",
            "principal_id": owner.id,
            "scopes": [Scope.USAGE_READ, Scope.INFERENCE],
            "allowed_models": ["m"],
            "metadata": {"team": "core"},
            "expires_at": datetime.now(UTC) + timedelta(days=90),
            **values,
        },
    )
    return made.view


async def test_f10_the_new_key_is_the_old_one_with_another_secret(session: AsyncSession) -> None:
    old = await full_key(session)
    before = await grant_of(session, old.key_id)
    made = await service.rotate_key(session, old.key_id)
    new, parsed = made.view, keys.parse(made.plain.reveal())
    assert parsed.key_id == new.key_id != old.key_id
    same = ("identity", "tenant", "project", "principal_id", "scopes", "metadata", "name", "allowed_models")
    assert [getattr(new, name) for name in same] == [getattr(old, name) for name in same]
    assert (new.expires_at, new.rotated_to, new.revoked_at) == (old.expires_at, None, None)
    grant = await grant_of(session, new.key_id)
    assert keys.verify(parsed, grant)
    assert not keys.verify(parsed, before)
    assert grant.identity == before.identity == old.key_id
    assert (grant.project_id, grant.scopes) == (before.project_id, before.scopes)


async def test_f10_both_keys_are_valid_in_grace_and_the_old_one_ends_with_it(session: AsyncSession) -> None:
    old = await full_key(session)
    started = datetime.now(UTC)
    new = (await service.rotate_key(session, old.key_id, grace_s=3600)).view
    ended = datetime.now(UTC)
    shown = await service.get_key(session, old.key_id)
    assert shown.rotated_to == new.key_id
    assert shown.expires_at is not None
    assert started + timedelta(hours=1) <= shown.expires_at <= ended + timedelta(hours=1)
    assert {old.key_id, new.key_id} <= {grant.key_id for grant in await service.load_keys(session)}
    await session.execute(
        text("UPDATE api_keys SET expires_at = now() - interval '1 s' WHERE key_id = :id"), {"id": old.key_id}
    )
    usable = {grant.key_id for grant in await service.load_keys(session)}
    assert new.key_id in usable
    assert old.key_id not in usable


async def test_a_grace_never_outlives_the_keys_own_expiry_and_none_ends_it_at_once(session: AsyncSession) -> None:
    soon = datetime.now(UTC) + timedelta(hours=2)
    old = await full_key(session, expires_at=soon)
    new = (await service.rotate_key(session, old.key_id, grace_s=30 * DAY_S)).view
    assert (await service.get_key(session, old.key_id)).expires_at == old.expires_at
    third = (await service.rotate_key(session, new.key_id, grace_s=0)).view
    ended = (await service.get_key(session, new.key_id)).expires_at
    assert ended is not None
    assert ended <= datetime.now(UTC)
    assert third.identity == old.key_id
    endless = (await make_key(session, "acme")).view
    assert (await service.rotate_key(session, endless.key_id)).view.expires_at is None
    assert (await service.get_key(session, endless.key_id)).expires_at is not None


async def test_f10_a_repeat_makes_no_second_key_and_names_the_first(session: AsyncSession) -> None:
    old = await full_key(session)
    first = await service.rotate_key(session, old.key_id, idempotency_key="once")
    with pytest.raises(ConflictError, match=first.view.key_id) as repeated:
        await service.rotate_key(session, old.key_id, idempotency_key="once")
    assert repeated.value.code == "idempotency_repeated"
    assert len((await service.list_keys(session, "acme")).items) == 2


@pytest.mark.parametrize(("idempotency_key", "code"), [("once", "idempotency_repeated"), (None, "key_rotated")])
async def test_f10_concurrent_rotations_make_one_key(
    committed_engine: AsyncEngine, idempotency_key: str | None, code: str
) -> None:
    async with transaction(committed_engine) as session:
        old = await full_key(session)

    async def rotate() -> str:
        try:
            async with transaction(committed_engine) as session:
                await service.rotate_key(session, old.key_id, idempotency_key=idempotency_key)
        except ConflictError as error:
            return error.code
        return "made"

    assert sorted(await asyncio.gather(*(rotate() for _ in range(6)))) == sorted(["made", *[code] * 5])
    async with transaction(committed_engine) as session:
        rows = (await service.list_keys(session, "acme")).items
    assert sorted(row.rotated_to or "" for row in rows) == ["", next(r.key_id for r in rows if not r.rotated_to)]


async def test_what_was_revoked_expired_or_rotated_is_not_rotated(session: AsyncSession) -> None:
    old = await full_key(session)
    revoked, expired = (await make_key(session, "acme")).view, (await make_key(session, "acme")).view
    await service.revoke_key(session, revoked.key_id)
    await session.execute(
        text("UPDATE api_keys SET expires_at = now() - interval '1 s' WHERE key_id = :id"), {"id": expired.key_id}
    )
    new = (await service.rotate_key(session, old.key_id)).view
    for key, code, said in (
        (revoked, "key_revoked", "was revoked"),
        (expired, "key_expired", "has expired"),
        (old, "key_rotated", f"was rotated to {new.key_id} already"),
    ):
        with pytest.raises(ConflictError, match=said) as refused:
            await service.rotate_key(session, key.key_id)
        assert refused.value.code == code
    with pytest.raises(NotFoundError):
        await service.rotate_key(session, "nosuchkey00")
    for grace in (-1, 30 * DAY_S + 1):
        with pytest.raises(InvalidRequestError) as bad:
            await service.rotate_key(session, new.key_id, grace_s=grace)
        assert bad.value.param == "grace_s"
    assert len((await service.list_keys(session, "acme")).items) == 4


async def test_f16_revoking_ends_one_key_of_a_chain_and_no_other(session: AsyncSession) -> None:
    old = await full_key(session)
    new = (await service.rotate_key(session, old.key_id)).view
    await service.revoke_key(session, old.key_id)
    assert (await grant_of(session, old.key_id)).revoked
    assert not (await grant_of(session, new.key_id)).revoked
