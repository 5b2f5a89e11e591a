"""The Replicas page. Layer: service."""

from __future__ import annotations

import time

from litestar import Response, get
from litestar.di import NamedDependency
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.admission.standing import standings
from controlplane.component import Resources
from controlplane.console.pages import AnyRequest, Console, wants_fragment
from controlplane.console.presenters import window_label
from controlplane.console.replica_card import replica_card
from controlplane.console.views import DEFAULT_WINDOW
from controlplane.fleet.service import list_replicas


@get("/replicas", include_in_schema=False)
async def replicas(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    resources: NamedDependency[Resources],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
) -> Response[str]:
    found = await list_replicas(session, resources.redis, time.time())
    overview = (await console.broadcaster.snapshot(DEFAULT_WINDOW)).overview
    scoped = {row.key: row for row in overview.by_replica} if overview else {}
    return console.answer(
        request,
        "replicas/_list.html" if wants_fragment(request) else "replicas/page.html",
        user=current_user,
        section="replicas",
        replicas=[replica_card(view, scoped.get(view.replica)) for view in found],
        window=window_label(DEFAULT_WINDOW),
    )


@get("/dispatch", include_in_schema=False)
async def dispatch(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    resources: NamedDependency[Resources],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
) -> Response[str]:
    """Who waits for each pool and what was planned: a panel of the Replicas page."""
    return console.answer(
        request,
        "dispatch/_panel.html" if wants_fragment(request) else "dispatch/page.html",
        user=current_user,
        section="replicas",
        lines=await standings(session, resources.redis, time.time()),
    )
