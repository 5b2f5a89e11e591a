"""A control plane under test, spoken to as operator, viewer, stranger or tenant.

The application runs on the test's own event loop, so a test may also use its engine and services directly.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from controlplane.accounts.schemas import Role as Rank
from controlplane.app import Application, Role, create_app
from controlplane.db import transaction
from controlplane.settings import Settings
from tests.factories.rows import PASSWORD, cheap_passwords, make_admin_token, make_key, make_tenant, make_user


@dataclass(frozen=True)
class Deployment:
    """A running application and the credentials of one of each who may knock."""

    app: Application
    client: httpx.AsyncClient
    settings: Settings
    operator_token: str
    viewer_token: str
    operator_email: str
    viewer_email: str
    tenant: str
    tenant_key: str

    @property
    def operator(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.operator_token}"}

    @property
    def viewer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.viewer_token}"}

    @property
    def tenant_member(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tenant_key}"}


@asynccontextmanager
async def deployment(settings: Settings, domains: Sequence[str] | None = None) -> AsyncIterator[Deployment]:
    """The control plane with the given domains (all of them for None) over a database with one of everything."""
    app = create_app(Role.CONTROL, settings, domains=domains)
    if "passwords" in app.state:
        app.state.passwords.close()
        app.state.passwords = cheap_passwords()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with started(app), httpx.AsyncClient(transport=transport, base_url="http://console.example") as client:
        async with transaction(app.state.resources.engine) as session:
            tenant = await make_tenant(session, "acme")
            yielded = Deployment(
                app=app,
                client=client,
                settings=settings,
                operator_token=(await make_admin_token(session)).reveal(),
                viewer_token=(await make_admin_token(session, Rank.VIEWER)).reveal(),
                operator_email=await make_user(session),
                viewer_email=await make_user(session, Rank.VIEWER),
                tenant=tenant.slug,
                tenant_key=(await make_key(session, tenant.slug)).plain.reveal(),
            )
        yield yielded


@asynccontextmanager
async def started(app: Application) -> AsyncIterator[None]:
    """The application's lifespan in a task of its own: a fixture's end runs in another task than its beginning."""
    up, down = asyncio.Event(), asyncio.Event()

    async def live() -> None:
        async with app.lifespan():
            up.set()
            await down.wait()

    living = asyncio.create_task(live())
    beginning = asyncio.create_task(up.wait())
    await asyncio.wait({living, beginning}, return_when=asyncio.FIRST_COMPLETED)
    if living.done():
        beginning.cancel()
        await living
    try:
        yield
    finally:
        down.set()
        await living


async def csrf_of(client: httpx.AsyncClient, path: str = "/login") -> str:
    """The CSRF token of a page's forms: the login page's, or once logged in another's."""
    page = await client.get(path)
    found = re.search(r'name="_csrf_token"\s+value="([^"]+)"', page.text)
    assert found is not None, "the page has no CSRF field"
    return found.group(1)


async def log_in(deployed: Deployment, email: str, password: str = PASSWORD) -> None:
    """Log the deployment's client in through the form."""
    token = await csrf_of(deployed.client)
    answer = await deployed.client.post(
        "/login", data={"email": email, "password": password, "_csrf_token": token}, follow_redirects=False
    )
    assert answer.status_code in {302, 303}, answer.text
