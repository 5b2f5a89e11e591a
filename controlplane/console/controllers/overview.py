"""The Overview page and its event stream. Layer: service."""

from __future__ import annotations

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromQuery

from controlplane.accounts.schemas import Principal
from controlplane.accounts.service import still_logged_in
from controlplane.console.pages import AnyRequest, Console, wants_fragment
from controlplane.console.stream import EventStream
from controlplane.console.views import DEFAULT_WINDOW, WINDOWS
from controlplane.errors import InvalidRequestError


@get("/", include_in_schema=False)
async def overview(
    request: AnyRequest,
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    window: FromQuery[int] = DEFAULT_WINDOW,
) -> Response[str]:
    window_s = window if window in WINDOWS else DEFAULT_WINDOW
    snapshot = await console.broadcaster.snapshot(window_s)
    return console.answer(
        request,
        "overview/_body.html" if wants_fragment(request) else "overview/page.html",
        user=current_user,
        section="overview",
        regions=snapshot.regions,
        window_s=window_s,
        windows=WINDOWS,
    )


@get("/events/overview", include_in_schema=False)
async def overview_events(
    request: AnyRequest, console: NamedDependency[Console], window: FromQuery[int] = DEFAULT_WINDOW
) -> EventStream:
    if window not in WINDOWS:
        raise InvalidRequestError(f"window must be one of {', '.join(map(str, WINDOWS))} seconds", param="window")
    return EventStream(console.broadcaster, window, lambda: still_logged_in(request))
