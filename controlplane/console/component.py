"""The console's part of the control plane: pages, their live source, and static files. Layer: service."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar import Litestar, Router
from litestar.datastructures import CacheControlHeader, State
from litestar.di import Provide
from litestar.static_files import create_static_files_router

from controlplane.accounts.browser import LoginRequiredError, on_login_required
from controlplane.component import Component, Resources
from controlplane.console.controllers import (
    canaries,
    changes,
    keys,
    overview,
    policy,
    prices,
    principals,
    projects,
    prompts,
    quota_requests,
    quotas,
    replicas,
    session,
    slos,
    tenants,
    usage,
)
from controlplane.console.live import Broadcaster, running
from controlplane.console.pages import Console
from controlplane.console.templates import STATIC, Templates
from controlplane.console.views import WINDOWS
from controlplane.db import transaction
from controlplane.telemetry.overview import overview as compute_overview
from controlplane.telemetry.schemas import Overview

PAGES = [
    overview.overview,
    overview.overview_events,
    replicas.replicas,
    replicas.dispatch,
    session.login_page,
    session.login,
    session.logout,
    tenants.tenants,
    tenants.create_tenant,
    tenants.activate,
    tenants.deactivate,
    keys.tenant_page,
    keys.create_key,
    keys.rotate_key,
    keys.revoke_key,
    projects.project_page,
    projects.create_project,
    projects.activate_project,
    projects.deactivate_project,
    *changes.PAGES,
    principals.principal_page,
    principals.create_principal,
    principals.change_role,
    principals.activate_principal,
    principals.deactivate_principal,
    *quotas.PAGES,
    *quota_requests.PAGES,
    *prices.PAGES,
    *slos.PAGES,
    *prompts.PAGES,
    *policy.PAGES,
    *usage.PAGES,
    *canaries.PAGES,
]


def component(resources: Resources) -> Component:
    """Pages behind the accounts' session, and the one task that keeps the Overview fresh."""

    async def load(window_s: int) -> Overview:
        async with transaction(resources.engine) as session:
            return await compute_overview(session, resources.redis, now=time.time(), window_s=window_s)

    templates = Templates()
    broadcaster = Broadcaster(load, templates, windows=WINDOWS, stale_after_s=resources.settings.stale_after_s)

    @asynccontextmanager
    async def live(_: Litestar) -> AsyncIterator[None]:
        async with running(broadcaster, resources.redis):
            yield

    pages = Router(
        "/",
        route_handlers=PAGES,
        dependencies={"console": Provide(_console, sync_to_thread=False)},
        exception_handlers={LoginRequiredError: on_login_required},
    )
    static = create_static_files_router(
        "/static", [STATIC], cache_control=CacheControlHeader(max_age=31_536_000, public=True, immutable=True)
    )
    return Component(
        routes=[pages, static],
        lifespans=[live],
        state={"console": Console(templates=templates, broadcaster=broadcaster), "templates": templates},
    )


def _console(state: State) -> Console:
    console: Console = state.console
    return console
