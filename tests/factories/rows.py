"""Rows in a test's database, made through the services that own them.

Every maker takes a session and flushes; nothing commits. Names are unique, so tests can make as many as they like.
"""

from __future__ import annotations

import itertools

from argon2 import PasswordHasher
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts import service as accounts
from controlplane.accounts.passwords import Passwords
from controlplane.accounts.schemas import Role
from controlplane.settings import Secret
from controlplane.tenants import principals
from controlplane.tenants import service as tenants
from controlplane.tenants.schemas import CreatedKey, PrincipalKind, PrincipalRole, PrincipalView, TenantView

PASSWORD = "correct horse battery staple"

_numbers = itertools.count(1)


def cheap_passwords() -> Passwords:
    """A hasher with argon2id's smallest costs, for tests that do not test the cost."""
    return Passwords(PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))


async def make_tenant(session: AsyncSession, slug: str | None = None, **values: object) -> TenantView:
    """A tenant of its own slug."""
    slug = slug or f"tenant-{next(_numbers)}"
    return await tenants.create_tenant(session, slug=slug, name=slug.title(), **values)  # type: ignore[arg-type]


async def make_key(session: AsyncSession, tenant: str, **values: object) -> CreatedKey:
    """A key of `tenant`."""
    return await tenants.create_key(session, tenant_slug=tenant, name=f"key {next(_numbers)}", **values)  # type: ignore[arg-type]


async def make_principal(
    session: AsyncSession, tenant: str, name: str | None = None, role: PrincipalRole = PrincipalRole.MEMBER
) -> PrincipalView:
    """A service account of `tenant`."""
    return await principals.create_principal(
        session,
        tenant,
        kind=PrincipalKind.SERVICE_ACCOUNT,
        name=name or f"principal {next(_numbers)}",
        role=role,
    )


async def make_user(session: AsyncSession, role: Role = Role.OPERATOR, email: str | None = None) -> str:
    """A user with PASSWORD; answers the email."""
    email = email or f"user-{next(_numbers)}@example.com"
    passwords = cheap_passwords()
    await accounts.create_user(session, email=email, password=PASSWORD, role=role, passwords=passwords)
    passwords.close()
    return email


async def make_admin_token(session: AsyncSession, role: Role = Role.OPERATOR) -> Secret:
    """A bearer token of the admin API."""
    token, _ = await accounts.create_api_token(session, name=f"token {next(_numbers)}", role=role)
    return token
