"""What a first start puts into an empty database so that a newcomer can use it at once. Repeating it is harmless.

Layer: service. Through the domains' services only, in one transaction. The operator's credentials are on disk before
the database learns them; a demo key that did not reach the disk is replaced by the next start.
"""

from __future__ import annotations

import secrets
import time

import msgspec
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts import service as accounts
from controlplane.db import create_engine, transaction
from controlplane.errors import NotFoundError, TidegateError
from controlplane.fleet import service as fleet
from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.files import write_private
from controlplane.local.home import Home, load_struct
from controlplane.settings import Settings
from controlplane.tenants import keys
from controlplane.tenants import service as tenants

ADMIN_EMAIL = "admin@tidegate.local"
API_TOKEN_NAME = "bootstrap"  # noqa: S105 - a name, no secret
DEMO_TENANT = "demo"


class Admin(msgspec.Struct, frozen=True, kw_only=True):
    """admin.json: the console's login and the admin API's bearer token."""

    email: str
    password: str
    api_token: str


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """demo.json: the demo tenant's working key."""

    tenant: str
    key: str


async def bootstrap(home: Home, settings: Settings, pool: str, served_model: str) -> tuple[Admin, Demo]:
    """Make sure that the operator, its token, the pool, the demo tenant and its key exist. Raises LocalError."""
    admin = load_struct(home.admin_file, Admin)
    if admin is None:
        admin = Admin(email=ADMIN_EMAIL, password=secrets.token_urlsafe(15), api_token=secrets.token_urlsafe(32))
        _keep(home, admin)
    engine = create_engine(settings, pooled=False)
    try:
        async with transaction(engine) as session:
            await accounts.ensure_admin(session, admin.email, admin.password)
            await accounts.ensure_api_token(session, API_TOKEN_NAME, admin.api_token)
            await fleet.ensure_pool(session, pool, served_model)
            try:
                await tenants.get_tenant(session, DEMO_TENANT)
            except NotFoundError:
                await tenants.create_tenant(session, slug=DEMO_TENANT, name="Demo")
            demo = load_struct(home.demo_file, Demo)
            fresh = None
            if demo is None or not await _is_in_force(session, demo.key):
                created = await tenants.create_key(session, tenant_slug=DEMO_TENANT, name="demo")
                fresh = demo = Demo(tenant=DEMO_TENANT, key=created.plain.reveal())
        if fresh is not None:
            _keep(home, fresh)
    except TidegateError as error:
        raise LocalError(f"cannot prepare the database: {error.message}") from None
    except (SQLAlchemyError, OSError) as error:
        raise LocalError(
            f"cannot prepare the database: {type(error).__name__} (is it shared with something else?)",
            ExitCode.SERVICE_UNREACHABLE,
        ) from None
    finally:
        await engine.dispose()
    return admin, demo


def require_undamaged(home: Home) -> None:
    """Raise LocalError when a file that a start needs is there and cannot be used; secrets not yet there are made."""
    for name in ("internal", "session", "metrics"):
        home.secret(name)
    load_struct(home.admin_file, Admin)
    load_struct(home.demo_file, Demo)


async def _is_in_force(session: AsyncSession, key: str) -> bool:
    """True when `key` is a key of this database that is in force, if its tenant is: another would be no better."""
    try:
        parsed = keys.parse(key)
    except keys.MalformedKeyError:
        return False
    grant = await tenants.load_key(session, parsed.key_id)
    if grant is None or not keys.verify(parsed, grant) or grant.revoked:
        return False
    return grant.expires_at is None or grant.expires_at > time.time()


def _keep(home: Home, struct: Admin | Demo) -> None:
    path = home.admin_file if isinstance(struct, Admin) else home.demo_file
    write_private(path, msgspec.json.format(msgspec.json.encode(struct), indent=2).decode() + "\n")
