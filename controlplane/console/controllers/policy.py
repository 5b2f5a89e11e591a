"""The Policy page: which epoch is in force where, what changed, and taking a change back. Layer: service.

The policy service decides. A refusal is shown on the page with its sentence.
"""

from __future__ import annotations

from typing import Any

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery
from litestar.response import Redirect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.component import Resources
from controlplane.console.confirmations import rolled_back
from controlplane.console.flash import go
from controlplane.console.pages import AnyRequest, Console, sentence
from controlplane.console.policy_rows import change_row, holder_row
from controlplane.errors import ConflictError, InvalidRequestError
from controlplane.policy import service

ROWS = 50


@get("/policy", include_in_schema=False)
async def policy_page(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    resources: NamedDependency[Resources],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    context = await _context(session, resources, after=after)
    return console.answer(request, "policy/page.html", user=current_user, section="policy", **context)


@post("/policy/changes/{change_id:int}/rollback", include_in_schema=False, status_code=200)
async def roll_back(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    resources: NamedDependency[Resources],
    change_id: FromPath[int],
) -> Response[str] | Redirect:
    try:
        made = await service.roll_back(session, change_id)
    except (ConflictError, InvalidRequestError) as error:
        context = await _context(session, resources, refused=(change_id, sentence(error.message)))
        status = 409 if isinstance(error, ConflictError) else 422
        return console.answer(
            request, "policy/page.html", user=current_user, section="policy", status=status, **context
        )
    return go(request, "/policy", rolled_back(change_id, made))


PAGES = [policy_page, roll_back]


async def _context(
    session: AsyncSession, resources: Resources, *, after: str | None = None, refused: tuple[int, str] | None = None
) -> dict[str, Any]:
    policy = await service.policy(session, resources.redis, stale_after_s=resources.settings.stale_after_s)
    page = await service.list_changes(session, after=after, limit=ROWS)
    return {
        "policy": policy,
        "holders": [holder_row(one) for one in policy.holders],
        "changes": [change_row(one) for one in page.items],
        "next": page.next,
        "after": after,
        "refused": refused,
    }
