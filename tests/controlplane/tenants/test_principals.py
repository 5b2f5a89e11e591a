"""People and service accounts on real Postgres: who they are, and what their role lets their keys do."""

from __future__ import annotations

from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.tenants import principals, service
from controlplane.tenants.schemas import PrincipalKind, PrincipalPatch, PrincipalRole, PrincipalView, Scope
from tests.factories.rows import make_key, make_tenant

ALLOWED = {
    PrincipalRole.VIEWER: {Scope.QUOTA_READ, Scope.USAGE_READ},
    PrincipalRole.MEMBER: {Scope.QUOTA_READ, Scope.USAGE_READ, Scope.INFERENCE, Scope.QUOTA_REQUEST},
    PrincipalRole.ADMIN: set(Scope),
}


async def bot(
    session: AsyncSession, name: str = "bot", role: PrincipalRole = PrincipalRole.MEMBER, tenant: str = "acme"
) -> PrincipalView:
    return await principals.create_principal(
        session, tenant, kind=PrincipalKind.SERVICE_ACCOUNT, name=name, role=role, idempotency_key=f"make {name}"
    )


@pytest.fixture(autouse=True)
async def acme(session: AsyncSession) -> None:
    await make_tenant(session, "acme")


async def test_a_person_and_a_service_account_are_created_shown_listed_and_found_by_name(session: AsyncSession) -> None:
    ada = await principals.create_principal(
        session,
        "acme",
        kind=PrincipalKind.PERSON,
        name="Ada",
        email="Ada@Example.com",
        role=PrincipalRole.ADMIN,
    )
    assert (ada.email, ada.kind, ada.active) == ("ada@example.com", PrincipalKind.PERSON, True)
    made = await bot(session)
    assert await principals.get_principal(session, "acme", made.id) == made
    assert {each.name for each in (await principals.list_principals(session, "acme")).items} == {"Ada", "bot"}
    assert (await principals.list_principals(session, "acme", name="bot")).items == [made]
    assert (await principals.list_principals(session, "acme", name="nobody")).items == []
    first = await principals.list_principals(session, "acme", limit=1)
    second = await principals.list_principals(session, "acme", limit=1, after=first.next)
    assert {first.items[0].name, second.items[0].name} == {"Ada", "bot"}
    assert second.next is None


@pytest.mark.parametrize(
    ("kind", "name", "email", "param"),
    [
        (PrincipalKind.PERSON, "Ada", None, "email"),
        (PrincipalKind.PERSON, "Ada", "ada", "email"),
        (PrincipalKind.PERSON, "Ada", "a@b\n", "email"),
        (PrincipalKind.PERSON, "Ada", f"{'a' * 250}@b.co", "email"),
        (PrincipalKind.SERVICE_ACCOUNT, "bot", "bot@example.com", "email"),
        (PrincipalKind.SERVICE_ACCOUNT, " ", None, "name"),
    ],
)
async def test_bad_fields_are_refused_by_name(
    session: AsyncSession, kind: PrincipalKind, name: str, email: str | None, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await principals.create_principal(session, "acme", kind=kind, name=name, email=email, role=PrincipalRole.MEMBER)
    assert caught.value.param == param


async def test_f10_a_repeated_creation_makes_one_and_a_name_is_taken_once(session: AsyncSession) -> None:
    made = await bot(session)
    assert await bot(session) == made
    with pytest.raises(ConflictError) as taken:
        await principals.create_principal(
            session, "acme", kind=PrincipalKind.SERVICE_ACCOUNT, name="bot", role=PrincipalRole.MEMBER
        )
    assert (taken.value.code, taken.value.param) == ("name_taken", "name")
    with pytest.raises(ConflictError, match="already made the principal bot"):
        await principals.create_principal(
            session,
            "acme",
            kind=PrincipalKind.SERVICE_ACCOUNT,
            name="other",
            role=PrincipalRole.MEMBER,
            idempotency_key="make bot",
        )


async def test_f36_a_principal_answers_within_its_own_tenant_only(session: AsyncSession) -> None:
    await make_tenant(session, "globex")
    made = await bot(session)
    for attempt in (
        principals.get_principal(session, "globex", made.id),
        principals.change_principal(session, "globex", made.id, PrincipalPatch(role=PrincipalRole.ADMIN)),
        make_key(session, "globex", principal_id=made.id),
        make_key(session, "acme", principal_id=uuid4()),
    ):
        with pytest.raises(NotFoundError) as missing:
            await attempt
        assert (missing.value.code, missing.value.param) == ("principal_not_found", "principal_id")
    assert (await principals.get_principal(session, "acme", made.id)).role is PrincipalRole.MEMBER


@pytest.mark.parametrize("role", list(PrincipalRole))
async def test_a_role_bounds_the_scopes_of_new_keys(session: AsyncSession, role: PrincipalRole) -> None:
    owner = await bot(session, role=role)
    assert set(owner.scopes) == ALLOWED[role]
    for scope in Scope:
        if scope in ALLOWED[role]:
            made = await make_key(session, "acme", principal_id=owner.id, scopes=[scope])
            assert (made.view.scopes, made.view.principal) == ([scope], "bot")
        else:
            with pytest.raises(InvalidRequestError, match=scope.value) as refused:
                await make_key(session, "acme", principal_id=owner.id, scopes=[scope])
            assert refused.value.param == "scopes"
    ordinary = (await make_key(session, "acme", principal_id=owner.id)).view
    assert set(ordinary.scopes) == {Scope.INFERENCE, Scope.QUOTA_READ} & ALLOWED[role]


async def test_a_key_without_owner_may_have_any_scope_once_and_has_two_by_default(session: AsyncSession) -> None:
    assert (await make_key(session, "acme")).view.scopes == [Scope.INFERENCE, Scope.QUOTA_READ]
    every = await make_key(session, "acme", scopes=[*Scope, Scope.ADMIN])
    assert every.view.scopes == list(Scope)
    with pytest.raises(InvalidRequestError) as none:
        await make_key(session, "acme", scopes=[])
    assert none.value.param == "scopes"


async def test_a_role_taken_away_bounds_keys_made_before_and_comes_back(session: AsyncSession) -> None:
    owner = await bot(session, role=PrincipalRole.ADMIN)
    key = (await make_key(session, "acme", principal_id=owner.id, scopes=list(Scope))).view.key_id

    async def scopes() -> set[str]:
        grant = await service.load_key(session, key)
        assert grant is not None
        assert set((await service.get_key(session, key)).scopes) == set(grant.scopes)
        return set(grant.scopes)

    for role in (PrincipalRole.ADMIN, PrincipalRole.VIEWER, PrincipalRole.MEMBER, PrincipalRole.ADMIN):
        epoch = await service.policy_epoch(session)
        await principals.change_principal(session, "acme", owner.id, PrincipalPatch(role=role))
        assert await service.policy_epoch(session) == epoch + 1
        assert await scopes() == ALLOWED[role]


async def test_an_inactive_principal_has_no_usable_and_gets_no_new_keys(session: AsyncSession) -> None:
    owner = await bot(session)
    key = (await make_key(session, "acme", principal_id=owner.id)).view.key_id
    assert key in {grant.key_id for grant in await service.load_keys(session)}
    changed = await principals.change_principal(session, "acme", owner.id, PrincipalPatch(active=False))
    assert not changed.active
    assert await principals.change_principal(session, "acme", owner.id, PrincipalPatch()) == changed
    grant = await service.load_key(session, key)
    assert grant is not None
    assert (grant.principal_active, grant.project_active, grant.tenant_active) == (False, True, True)
    assert key not in {grant.key_id for grant in await service.load_keys(session)}
    with pytest.raises(ConflictError) as inactive:
        await make_key(session, "acme", principal_id=owner.id)
    assert (inactive.value.code, inactive.value.param) == ("principal_inactive", "principal_id")
