"""Tenants ask for more of a limit; an operator approves or declines.

Layer: service. Every function takes the caller's session and never commits: an approval and what it changes are one
transaction. A request decided twice at once is decided once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.paging import Cursor, Page, checked, decode_uuid, page
from controlplane.quotas import repository, service
from controlplane.quotas import request_repository as requests
from controlplane.quotas.models import Quota, QuotaRequest
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.validation import check_more, check_name, check_span, check_text
from controlplane.quotas.views import GrantSpec, QuotaPatch, QuotaRequestSpec, QuotaRequestView, RequestState
from controlplane.tenants.owner import Owner, resolve_owner

MOST_OPEN = 100
"""Open requests of one tenant."""


async def ask(
    session: AsyncSession, tenant: str | UUID, spec: QuotaRequestSpec, *, by: str, idempotency_key: str | None = None
) -> QuotaRequestView:
    """A request for more of one limit of `tenant`. Repeated with the same idempotency key, the one made before.

    Raises InvalidRequestError, NotFoundError for a limit that is not the tenant's, or ConflictError when too many wait.
    """
    check_more(spec.amount)
    reason = check_text("reason", spec.reason)
    now = datetime.now(UTC)
    if spec.until is not None:
        _check_until(spec.until, now)
    owner = await resolve_owner(session, tenant, project=spec.project, key_id=spec.key)
    if await requests.count_open(session, owner.tenant_id) >= MOST_OPEN:
        raise ConflictError(f"{MOST_OPEN} requests wait for a decision already", code="too_many_requests")
    quota = await _quota(session, owner, spec)
    added = await requests.add(
        session,
        tenant_id=owner.tenant_id,
        tenant=owner.tenant,
        quota_id=quota.id,
        project=quota.project,
        key_identity=quota.key_identity,
        model=quota.model,
        kind=quota.kind,
        amount=spec.amount,
        until=spec.until,
        reason=reason,
        asked_by=by,
        idempotency_key=idempotency_key,
    )
    if added is None:
        assert idempotency_key is not None
        added = await requests.by_idempotency_key(session, owner.tenant_id, idempotency_key)
        if added is None or (added.quota_id, added.amount) != (quota.id, spec.amount):
            raise ConflictError("this idempotency key already made another request", code="idempotency_mismatch")
    return request_view(added)


async def list_requests(
    session: AsyncSession,
    *,
    tenant: str | None = None,
    state: RequestState | None = None,
    after: str | None = None,
    limit: int = 50,
) -> Page[QuotaRequestView]:
    """Requests of one tenant or of all, oldest first. One query. Raises InvalidRequestError."""
    limit, key = checked(limit), decode_uuid(after)
    rows = await requests.requests(session, tenant=tenant, state=state, after=key, limit=limit)
    return page(rows, limit, request_view, lambda row: Cursor(row.created_at, str(row.id)))


async def get_request(session: AsyncSession, request_id: UUID) -> QuotaRequestView:
    """Raises NotFoundError."""
    row = await requests.one(session, request_id)
    if row is None:
        raise _no_request(request_id)
    return request_view(row)


async def approve(session: AsyncSession, request_id: UUID, *, by: str, note: str = "") -> QuotaRequestView:
    """Give what was asked for: a raise until then, or for good a higher limit.

    Raises NotFoundError, or ConflictError when it is decided already, the limit is gone or the time has passed.
    """
    async with session.begin_nested():  # a refusal leaves the request open, whatever the caller makes of it
        row = await _decide(session, request_id, RequestState.APPROVED, by=by, note=note)
        await _give(session, row, by)
    return request_view(row)


async def decline(session: AsyncSession, request_id: UUID, *, by: str, note: str = "") -> QuotaRequestView:
    """Give nothing. Raises NotFoundError, or ConflictError when it is decided already."""
    return request_view(await _decide(session, request_id, RequestState.DECLINED, by=by, note=note))


def request_view(row: QuotaRequest) -> QuotaRequestView:
    """A row as operators and its tenant see it."""
    return QuotaRequestView(
        id=row.id,
        tenant=row.tenant,
        quota_id=row.quota_id,
        project=row.project,
        key=row.key_identity,
        model=row.model or None,
        kind=QuotaKind(row.kind),
        amount=row.amount,
        until=row.until,
        reason=row.reason,
        asked_by=row.asked_by,
        state=RequestState(row.state),
        decided_by=row.decided_by,
        decided_at=row.decided_at,
        note=row.note,
        created_at=row.created_at,
    )


async def _quota(session: AsyncSession, owner: Owner, spec: QuotaRequestSpec) -> Quota:
    """The limit a request names by its id or by what it limits; another tenant's does not exist."""
    if (spec.quota_id is None) == (spec.kind is None):
        raise InvalidRequestError("name the limit by its quota_id, or by its kind and whose it is", param="quota_id")
    if spec.quota_id is not None:
        if spec.project is not None or spec.key is not None or spec.model is not None:
            raise InvalidRequestError("a quota_id says whose limit it is already", param="quota_id")
        quota = await repository.quota(session, spec.quota_id)
    else:
        assert spec.kind is not None
        if spec.project is not None and spec.key is not None:
            raise InvalidRequestError("a limit is a project's or a key's, not both", param="key")
        quota = await repository.quota_by_scope(
            session,
            tenant_id=owner.tenant_id,
            project_id=owner.project_id,
            identity=owner.identity,
            model=check_name("model", spec.model),
            kind=spec.kind,
        )
    if quota is None or quota.tenant_id != owner.tenant_id:
        raise NotFoundError("there is no such limit to ask more of", code="quota_not_found", param="quota_id")
    return quota


async def _give(session: AsyncSession, row: QuotaRequest, by: str) -> None:
    if row.quota_id is None:
        raise ConflictError("the limit it asks about is gone: decline it", code="quota_gone")
    if row.until is None:
        quota = await repository.quota(session, row.quota_id, lock=True)
        assert quota is not None  # the request refers to it
        raised = QuotaPatch(soft=_more(quota.soft, row.amount), hard=_more(quota.hard, row.amount))
        await service.change_quota(session, row.quota_id, raised)
    else:
        if row.until <= datetime.now(UTC):
            raise ConflictError("the time it asks for has passed: decline it", code="request_expired")
        given = GrantSpec(amount=row.amount, expires_at=row.until, reason=row.reason)
        await service.grant(session, row.quota_id, given, by=by)


async def _decide(session: AsyncSession, request_id: UUID, state: RequestState, *, by: str, note: str) -> QuotaRequest:
    note = check_text("note", note, optional=True)
    row = await requests.decide(session, request_id, state, by=by, note=note)
    if row is None:
        before = await requests.one(session, request_id)
        if before is None:
            raise _no_request(request_id)
        raise ConflictError(f"the request was {before.state} by {before.decided_by}", code="request_decided")
    return row


def _check_until(until: datetime, now: datetime) -> None:
    """As a raise that starts now would end, under the name the request has for it."""
    try:
        check_span(now, until, now)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message.replace("expires_at", "until"), param="until") from None


def _more(limit: int | None, amount: int) -> int | None:
    return None if limit is None else limit + amount


def _no_request(request_id: UUID) -> NotFoundError:
    return NotFoundError(f"there is no request {request_id}", code="request_not_found", param="request_id")
