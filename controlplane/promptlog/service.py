"""The opt-in log of prompts and answers: turning it on and off, storing, reading, forgetting.

Layer: service. Takes the caller's session and never commits. Off unless a tenant turned it on; turning it off deletes
what is there in the same transaction. Nobody reads a text without being on record.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import InvalidRequestError, NotFoundError
from controlplane.paging import Cursor, Page, checked, decode, page
from controlplane.promptlog import repository
from controlplane.promptlog.redaction import check_template
from controlplane.promptlog.repository import EntryRow
from controlplane.promptlog.schemas import EntryText, EntryView, LoggedEntry, PromptLogView, ReadView
from controlplane.tenants import prompt_logging
from controlplane.tenants.schemas import PromptLogging

MAX_ROWS = 100_000
"""Logged requests of one tenant; the oldest go first."""
READS_DAYS = 400


async def show(session: AsyncSession, slug: str) -> PromptLogView:
    """What a tenant has asked for. Raises NotFoundError."""
    _, wanted = await prompt_logging.prompt_logging(session, slug)
    return _view(slug, wanted)


async def turn_on(session: AsyncSession, slug: str, wanted: PromptLogging) -> PromptLogView:
    """Keep requests from now on, or keep them differently. Raises InvalidRequestError or NotFoundError."""
    try:
        for template in wanted.templates:
            check_template(template)
    except ValueError as error:
        raise InvalidRequestError(str(error), param="templates") from None
    await prompt_logging.set_prompt_logging(session, slug, wanted)
    return _view(slug, wanted)


async def turn_off(session: AsyncSession, slug: str) -> PromptLogView:
    """Keep nothing any more, and delete what was kept, now. A repeat changes nothing. Raises NotFoundError."""
    tenant_id = await prompt_logging.set_prompt_logging(session, slug, None)
    await repository.delete_all(session, tenant_id)
    return _view(slug, None)


async def store(session: AsyncSession, entries: Sequence[LoggedEntry]) -> int:
    """Store what gateways sent, but for tenants that have turned it off meanwhile; returns how many."""
    return await repository.store(session, entries) if entries else 0


async def list_entries(
    session: AsyncSession, slug: str, *, after: str | None = None, limit: int = 50
) -> Page[EntryView]:
    """Logged requests, newest first, without their texts. Raises NotFoundError or InvalidRequestError."""
    limit, before = checked(limit), _key(after)
    tenant_id, _ = await prompt_logging.prompt_logging(session, slug)
    rows = await repository.entries(session, tenant_id, before=before, limit=limit)
    return page(rows, limit, lambda row: _entry(slug, row), lambda row: Cursor(row.at, str(row.id)))


async def read_entry(session: AsyncSession, slug: str, entry_id: int, *, reader: str) -> EntryText:
    """One logged request with its texts; that `reader` read it is stored with the same transaction.

    Raises NotFoundError.
    """
    tenant_id, _ = await prompt_logging.prompt_logging(session, slug)
    found = await repository.entry(session, tenant_id, entry_id)
    if found is None:
        raise NotFoundError(
            f"the tenant {slug} has no logged request {entry_id}", code="logged_request_not_found", param="entry_id"
        )
    row, prompt, answer = found
    await repository.add_read(session, reader=reader, tenant=slug, entry_id=entry_id, request_id=row.request_id)
    return EntryText(entry=_entry(slug, row), prompt=prompt, answer=answer)


async def list_reads(session: AsyncSession, slug: str, *, after: str | None = None, limit: int = 50) -> Page[ReadView]:
    """Who read a tenant's requests, newest first. Raises NotFoundError or InvalidRequestError."""
    limit, before = checked(limit), _key(after)
    await prompt_logging.prompt_logging(session, slug)
    rows = await repository.reads(session, slug, before=before, limit=limit)
    return page(
        rows,
        limit,
        lambda row: ReadView(
            at=row.at, reader=row.reader, tenant=row.tenant, entry_id=row.entry_id, request_id=row.request_id
        ),
        lambda row: Cursor(row.at, str(row.id)),
    )


async def forget(session: AsyncSession, now: float, *, limit: int, max_rows: int = MAX_ROWS) -> int:
    """Delete what is older than its tenant keeps it, or too much, at most `limit` of each; returns how many went."""
    gone = await repository.delete_old(session, now, limit)
    gone += await repository.delete_surplus(session, max_rows, limit)
    return gone + await repository.delete_reads(session, now, READS_DAYS, limit)


def _key(after: str | None) -> tuple[datetime, int] | None:
    cursor = decode(after)
    if cursor is None:
        return None
    if not cursor.id.isdecimal() or len(cursor.id) > 18:
        raise InvalidRequestError("the cursor is not one of this list", param="after")
    return cursor.at, int(cursor.id)


def _view(slug: str, wanted: PromptLogging | None) -> PromptLogView:
    shown = wanted or PromptLogging()
    return PromptLogView(
        tenant=slug,
        log_prompts=wanted is not None,
        retention_days=shown.retention_days,
        sample=shown.sample,
        redact=list(shown.redact),
        templates=list(shown.templates),
    )


def _entry(slug: str, row: EntryRow) -> EntryView:
    return EntryView(tenant=slug, **row._asdict())
