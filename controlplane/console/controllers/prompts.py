"""A tenant's prompt log: turn it on and off, list what is kept, read one, see who read. Layer: service.

The promptlog service decides. Reading a text is a form that is sent, so that only operators can and each is on record.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, URLEncodedBody
from litestar.response import Redirect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.console import forms
from controlplane.console.pages import AnyRequest, Console, Form
from controlplane.errors import InvalidRequestError
from controlplane.promptlog import service
from controlplane.promptlog.schemas import EntryText, PromptLogView
from controlplane.tenants import service as tenants
from controlplane.tenants.schemas import PromptLogging, Redaction

ROWS = 50
READS = 20
BODY_LIMIT = 64 * 1024
TEMPLATE = "prompts/page.html"
KINDS = (
    (Redaction.EMAILS.value, "addresses of mail"),
    (Redaction.CARDS.value, "numbers of payment cards"),
    (Redaction.SECRETS.value, "API keys, tokens, passwords, private keys"),
    (Redaction.PHONES.value, "telephone numbers"),
)


class PromptLogForm(msgspec.Struct, frozen=True):
    retention_days: str = "7"
    sample: str = "100"
    templates: str = ""
    emails: str = ""
    cards: str = ""
    secrets: str = ""
    phones: str = ""


@get("/tenants/{slug:str}/prompts", include_in_schema=False)
async def prompts_page(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    context = await _context(session, slug, after=after)
    return console.answer(request, TEMPLATE, user=current_user, section="tenants", **context)


@post("/tenants/{slug:str}/prompts", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def turn_on(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    data: URLEncodedBody[PromptLogForm],
) -> Response[str] | Redirect:
    try:
        await service.turn_on(session, slug, _wish(data))
    except InvalidRequestError as error:
        form = Form.refused(msgspec.structs.asdict(data), error)
        context = await _context(session, slug, form=form)
        return console.answer(request, TEMPLATE, user=current_user, section="tenants", status=422, **context)
    return forms.go(request, f"/tenants/{slug}/prompts")


@post("/tenants/{slug:str}/prompts/off", include_in_schema=False, status_code=303)
async def turn_off(
    request: AnyRequest, session: NamedDependency[AsyncSession], slug: FromPath[str]
) -> Response[str] | Redirect:
    await service.turn_off(session, slug)
    return forms.go(request, f"/tenants/{slug}/prompts")


@post("/tenants/{slug:str}/prompts/{entry_id:int}/read", include_in_schema=False, status_code=200)
async def read(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    entry_id: FromPath[int],
) -> Response[str]:
    text = await service.read_entry(session, slug, entry_id, reader=current_user.name)
    context = await _context(session, slug, text=text)
    return console.answer(request, TEMPLATE, user=current_user, section="tenants", **context)


PAGES = [prompts_page, turn_on, turn_off, read]


async def _context(
    session: AsyncSession,
    slug: str,
    *,
    after: str | None = None,
    form: Form | None = None,
    text: EntryText | None = None,
) -> dict[str, Any]:
    log = await service.show(session, slug)
    return {
        "tenant": await tenants.get_tenant(session, slug),
        "tab": "prompts",
        "served": None,
        "log": log,
        "kinds": KINDS,
        "page": await service.list_entries(session, slug, after=after, limit=ROWS),
        "reads": (await service.list_reads(session, slug, limit=READS)).items,
        "after": after,
        "form": form or _form(log),
        "text": text,
    }


def _form(log: PromptLogView) -> Form:
    values = {
        "retention_days": str(log.retention_days),
        "sample": f"{log.sample * 100:.9g}",
        "templates": ", ".join(log.templates),
    }
    return Form(values | {kind.value: "on" for kind in log.redact})


def _wish(data: PromptLogForm) -> PromptLogging:
    """Raises InvalidRequestError by field."""
    days = forms.required("retention_days", data.retention_days)
    if not 1 <= days <= 30:
        raise InvalidRequestError("requests are kept from 1 to 30 days", param="retention_days")
    sample = forms.share("sample", data.sample)
    if sample is None or not 0 < sample <= 1:
        raise InvalidRequestError("the share is above 0 and at most 100 per cent", param="sample")
    templates = [one.strip() for one in data.templates.split(",") if one.strip()]
    if len(templates) > 20:
        raise InvalidRequestError("there can be 20 templates", param="templates")
    kinds = [kind for kind in Redaction if getattr(data, kind.value)]
    return PromptLogging(retention_days=days, sample=sample, redact=kinds, templates=templates)
