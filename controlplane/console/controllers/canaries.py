"""The Canaries page: when each limit was last proven. Layer: service. The canaries' service decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery
from litestar.response import Redirect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.canaries import service
from controlplane.canaries.schemas import CanaryState, CanaryView
from controlplane.component import Resources
from controlplane.console.confirmations import canaries_asked
from controlplane.console.controllers.quotas import KINDS
from controlplane.console.flash import go
from controlplane.console.pages import AnyRequest, Console

ROWS = 100


@get("/canaries", include_in_schema=False)
async def canaries(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    resources: NamedDependency[Resources],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    every_s = resources.settings.canary_every_s
    views = await service.all_canaries(session, every_s=every_s)
    counts = Counter(view.state for view in views)
    page = await service.list_canaries(session, every_s=every_s, after=after, limit=ROWS)
    return console.answer(
        request,
        "canaries/overview.html",
        user=current_user,
        section="canaries",
        page=page,
        rows=failing_first(page.items, views, first_page=after is None),
        counts=[(state, counts[state]) for state in CanaryState],
        every_s=every_s,
        after=after,
        kinds=dict(KINDS),
    )


@post("/canaries/run", include_in_schema=False, status_code=303)
async def run_canaries(request: AnyRequest, session: NamedDependency[AsyncSession]) -> Response[str] | Redirect:
    await service.ask(session)
    return go(request, "/canaries", canaries_asked())


def failing_first(items: Sequence[CanaryView], views: Sequence[CanaryView], *, first_page: bool) -> list[CanaryView]:
    """The lines of a page: the first one begins with what fails of all `views`, at most ROWS, and no other has it."""
    failing = [view for view in views if view.state is CanaryState.FAILING][:ROWS]
    shown = {view.id for view in failing}
    return [*(failing if first_page else ()), *(view for view in items if view.id not in shown)]


PAGES = [canaries, run_canaries]
