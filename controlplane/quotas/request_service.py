"""Tenants ask for more of a limit; an operator approves or declines.

Layer: service. Every function takes the caller's session and never commits: an approval and what it changes are one
transaction. A request decided twice at once is decided once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.idempotency import check_repeat
from controlplane.paging import Cursor, Page, checked, decode_uuid, page
from controlplane.quotas import repository, service
from controlplane.quotas import request_repository as requests
from controlplane.quotas.models import Quota, QuotaRequest
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.validation import check_more, check_name, check_span, check_text
from controlplane.quotas.views import (
    ApprovalSpec,
    GrantSpec,
    MoreSpec,
    QuotaPatch,
    QuotaRequestSpec,
    QuotaRequestView,
    RequestState,
)
from controlplane.tenants.owner import Owner, resolve_owner

MOST_OPEN = 100
"""Open requests of one tenant."""


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """The key that asks, and whose it is; `project` is a slug, `identity` survives rotations."""

    tenant_id: UUID
    project: str
    identity: str
    key_id: str

    def meets(self, tenant_id: UUID, project: str | None, identity: str | None) -> bool:
        """Whether requests of this key must respect a limit of that tenant, project or key."""
        if tenant_id != self.tenant_id:
            return False
        return identity == self.identity if identity is not None else project in (None, self.project)


async def ask(
    session: AsyncSession, tenant: str | UUID, spec: QuotaRequestSpec, *, by: str, idempotency_key: str | None = None
) -> QuotaRequestView:
    """A request for more of one limit of `tenant`. Repeated with the same idempotency key, the one made before.

    Raises InvalidRequestError, NotFoundError for a limit that is not the tenant's, or ConflictError when too many wait.
    """
    check_more(spec.amount)
    _check(spec.reason, spec.until)
    owner = await resolve_owner(session, tenant, project=spec.project, key_id=spec.key)
    await requests.lock(session, owner.tenant_id)
    quota = await _quota(session, owner, spec)
    if (before := await _before(session, owner.tenant_id, idempotency_key)) is not None:
        named = ("quota_id",) if spec.quota_id is not None else ("kind", "project", "key", "model")
        asked: dict[str, tuple[object, object]] = dict.fromkeys(named, (quota.id, before.quota_id))
        _check_repeat(before, spec, {**asked, "amount": (spec.amount, before.amount)})
        return request_view(before)
    return await _add(session, quota, spec, wanted=None, by=by, idempotency_key=idempotency_key)


async def ask_with_key(
    session: AsyncSession, asker: Asker, spec: MoreSpec, *, idempotency_key: str | None = None
) -> QuotaRequestView:
    """As `ask`, by a tenant's key and about a limit that this key meets: any other one does not exist for it."""
    _check(spec.reason, spec.until)
    await requests.lock(session, asker.tenant_id)
    quota = await repository.quota(session, spec.quota_id)
    if quota is None or not asker.meets(quota.tenant_id, quota.project, quota.key_identity):
        raise NotFoundError("this key meets no such limit", code="quota_not_found", param="quota_id")
    if (before := await _before(session, asker.tenant_id, idempotency_key)) is not None:
        if not asker.meets(before.tenant_id, before.project, before.key_identity):
            raise ConflictError("another key has used this idempotency key already", code="idempotency_mismatch")
        _check_repeat(before, spec, {"quota_id": (spec.quota_id, before.quota_id), "hard": (spec.hard, before.wanted)})
        return request_view(before)
    if quota.hard is None:
        raise InvalidRequestError("this limit refuses nothing: it only warns", param="quota_id")
    if spec.hard <= quota.hard:
        raise InvalidRequestError(f"hard must be above {quota.hard}, which the limit is already", param="hard")
    more = QuotaRequestSpec(quota_id=quota.id, amount=spec.hard - quota.hard, reason=spec.reason, until=spec.until)
    by = f"key {asker.key_id}"
    return await _add(session, quota, more, wanted=spec.hard, by=by, idempotency_key=idempotency_key)


async def list_with_key(
    session: AsyncSession, asker: Asker, *, after: str | None = None, limit: int = 50
) -> Page[QuotaRequestView]:
    """Requests about limits that the key meets, newest first. One query. Raises InvalidRequestError."""
    limit, key = checked(limit), decode_uuid(after)
    rows = await requests.of_key(session, asker.tenant_id, asker.project, asker.identity, after=key, limit=limit)
    return page(rows, limit, request_view, lambda row: Cursor(row.created_at, str(row.id)))


async def get_with_key(session: AsyncSession, asker: Asker, request_id: UUID) -> QuotaRequestView:
    """Raises NotFoundError, also for a request about what the key does not meet."""
    row = await requests.one_of_key(session, asker.tenant_id, asker.project, asker.identity, request_id)
    if row is None:
        raise _no_request(request_id)
    return request_view(row)


async def count_waiting(session: AsyncSession, most: int) -> int:
    """How many requests of all tenants wait for a decision, counted as far as `most`."""
    return await requests.count_open(session, None, most)


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


async def approve(
    session: AsyncSession, request_id: UUID, *, by: str, given: ApprovalSpec | None = None
) -> QuotaRequestView:
    """Give what was asked for, or what `given` says: a raise until then, or for good a higher limit.

    Raises InvalidRequestError, NotFoundError, or ConflictError when it is decided already, the limit is gone or the
    time has passed.
    """
    given = given or ApprovalSpec()
    async with session.begin_nested():  # a refusal leaves the request open, whatever the caller makes of it
        asked = await get_request(session, request_id)
        amount = await _missing(session, asked) if given.amount is UNSET else given.amount
        until = asked.until if given.until is UNSET else given.until
        check_more(amount)
        if given.until is not UNSET and given.until is not None:
            _check_until(given.until, datetime.now(UTC))
        note = check_text("note", given.note, optional=True)
        row = await _decide(
            session, request_id, RequestState.APPROVED, decided_by=by, note=note, given=amount, given_until=until
        )
        await _give(session, row, amount, until, by)
    return request_view(row)


async def decline(session: AsyncSession, request_id: UUID, *, by: str, note: str = "") -> QuotaRequestView:
    """Give nothing. Raises NotFoundError, or ConflictError when it is decided already."""
    note = check_text("note", note, optional=True)
    return request_view(await _decide(session, request_id, RequestState.DECLINED, decided_by=by, note=note))


def missing(asked: QuotaRequestView, hard: int | None) -> int:
    """By how much a limit that is `hard` now is below what was asked for; what was asked for may have been given, in
    whole or in part, since. Zero or less when nothing is missing.
    """
    return asked.amount if asked.wanted is None or hard is None else asked.wanted - hard


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
        wanted=row.wanted,
        until=row.until,
        reason=row.reason,
        asked_by=row.asked_by,
        state=RequestState(row.state),
        decided_by=row.decided_by,
        decided_at=row.decided_at,
        note=row.note,
        given=row.given,
        given_until=row.given_until,
        created_at=row.created_at,
    )


async def _missing(session: AsyncSession, asked: QuotaRequestView) -> int:
    """`missing` of the limit as it is, which stays so until the transaction ends. Raises ConflictError."""
    quota = None if asked.quota_id is None else await repository.quota(session, asked.quota_id, lock=True)
    if quota is None or asked.state is not RequestState.OPEN:
        return asked.amount
    amount = missing(asked, quota.hard)
    if amount <= 0:
        raise ConflictError(
            f"the limit is {quota.hard} already, and {asked.wanted} was asked for: decline it", code="given_already"
        )
    return amount


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


async def _add(
    session: AsyncSession,
    quota: Quota,
    spec: QuotaRequestSpec,
    *,
    wanted: int | None,
    by: str,
    idempotency_key: str | None,
) -> QuotaRequestView:
    """The new request; the caller holds the tenant's lock and knows that its idempotency key is free."""
    if await requests.count_open(session, quota.tenant_id, MOST_OPEN) >= MOST_OPEN:
        raise ConflictError(f"{MOST_OPEN} requests wait for a decision already", code="too_many_requests")
    added = await requests.add(
        session,
        tenant_id=quota.tenant_id,
        tenant=quota.tenant,
        quota_id=quota.id,
        project=quota.project,
        key_identity=quota.key_identity,
        model=quota.model,
        kind=quota.kind,
        amount=spec.amount,
        wanted=wanted,
        until=spec.until,
        reason=check_text("reason", spec.reason),
        asked_by=by,
        idempotency_key=idempotency_key,
    )
    assert added is not None  # under the tenant's lock nobody else can have taken the key
    return request_view(added)


async def _before(session: AsyncSession, tenant_id: UUID, idempotency_key: str | None) -> QuotaRequest | None:
    return await requests.by_idempotency_key(session, tenant_id, idempotency_key) if idempotency_key else None


def _check_repeat(
    before: QuotaRequest, spec: QuotaRequestSpec | MoreSpec, asked: dict[str, tuple[object, object]]
) -> None:
    reason = check_text("reason", spec.reason)
    more = {"until": (spec.until, before.until), "reason": (reason, before.reason)}
    check_repeat(f"the request {before.id}", {**asked, **more})


async def _give(session: AsyncSession, row: QuotaRequest, amount: int, until: datetime | None, by: str) -> None:
    if row.quota_id is None:
        raise ConflictError("the limit it asks about is gone: decline it", code="quota_gone")
    if until is None:
        quota = await repository.quota(session, row.quota_id, lock=True)
        assert quota is not None  # the request refers to it
        raised = QuotaPatch(soft=_more(quota.soft, amount), hard=_more(quota.hard, amount))
        await service.change_quota(session, row.quota_id, raised)
        return
    if until <= datetime.now(UTC):
        raise ConflictError("the time it asks for has passed: give another or decline it", code="request_expired")
    _check_until(until, datetime.now(UTC))
    given = GrantSpec(amount=amount, expires_at=until, reason=row.reason)
    await service.grant(session, row.quota_id, given, by=by)


async def _decide(session: AsyncSession, request_id: UUID, state: RequestState, **values: Any) -> QuotaRequest:
    row = await requests.decide(session, request_id, state, **values)
    if row is None:
        before = await requests.one(session, request_id)
        if before is None:
            raise _no_request(request_id)
        raise ConflictError(f"the request was {before.state} by {before.decided_by}", code="request_decided")
    return row


def _check(reason: str, until: datetime | None) -> None:
    check_text("reason", reason)
    if until is not None:
        _check_until(until, datetime.now(UTC))


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
