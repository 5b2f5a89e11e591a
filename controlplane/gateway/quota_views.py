"""What `/v1/quota` answers, in OpenAI's manner: lists of objects, times with their zone, null for what nobody knows.

Layer: service. Pure. Times that belong to a limit's window are in the tenant's time zone, others in UTC.
"""

from __future__ import annotations

import enum
from datetime import UTC, datetime, tzinfo
from typing import Any, Generic, TypeVar

import msgspec

from controlplane.admission.charges import COUNTERS, DAILY, SIZES, Counter
from controlplane.gateway.quota_use import LimitUse, Source, Unknown
from controlplane.quotas.forecast import METHOD, Forecast, Outcome, Rate
from controlplane.quotas.limits import effective
from controlplane.quotas.schemas import Away, Limit, QuotaKind, QuotaLevel
from controlplane.quotas.views import QuotaRequestView, RequestState
from controlplane.telemetry.refusals import LatestRefusal, RefusalCount, Refusals

MINUTE_S = 60.0
Item = TypeVar("Item")


class Window(enum.StrEnum):
    """What use of a limit adds up over."""

    SLIDING_MINUTE = "sliding_minute"
    DAY = "calendar_day"
    MONTH = "calendar_month"
    IN_FLIGHT = "in_flight"
    REQUEST = "request"


class LimitState(enum.StrEnum):
    """How near a limit is."""

    OK = "ok"
    ABOVE_SOFT = "above_soft"
    EXHAUSTED = "exhausted"
    UNKNOWN = "unknown"


class QuotaList(msgspec.Struct, Generic[Item], frozen=True, kw_only=True):
    """One page; `after=<next>` asks for the one that follows while `has_more`."""

    object: str = "list"
    data: list[Item]
    has_more: bool = False
    next: str | None = None


class RaiseNow(msgspec.Struct, frozen=True, kw_only=True):
    """A temporary raise in force."""

    amount: int
    expires_at: datetime


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """One limit that concerns the key. `soft` and `hard` hold now, with the raises in `grants`; `declared_*` are
    without them. `used` is what ended requests used, `reserved` what running ones hold; where the two cannot be told
    apart `used` is both and `reserved` null. `used` null comes with `unknown_because`, and is never a 0.
    """

    id: str
    object: str = "quota"
    kind: QuotaKind
    level: QuotaLevel
    model: str | None
    soft: int | None
    hard: int | None
    declared_soft: int | None
    declared_hard: int | None
    grants: list[RaiseNow]
    window: Window
    resets_at: datetime | None
    used: int | None
    reserved: int | None
    remaining: int | None
    state: LimitState
    source: Source
    as_of: datetime
    unknown_because: Unknown | None
    while_redis_is_away: Away
    each_gateway_alone: int


class QuotaForecast(msgspec.Struct, frozen=True, kw_only=True):
    """When one limit is exhausted if the mean rate of the last `window_s` seconds, seen in `n` attempts, goes on."""

    id: str
    object: str = "quota.forecast"
    kind: QuotaKind
    level: QuotaLevel
    model: str | None
    outcome: Outcome
    exhausts_at: datetime | None
    resets_at: datetime | None
    method: str = METHOD
    window_s: float | None
    n: int | None
    rate_per_s: float | None
    used: int | None
    hard: int | None


class RefusalPage(msgspec.Struct, frozen=True, kw_only=True):
    """The tenant's refused requests of the last `window_s` seconds by reason, and the latest of them."""

    object: str = "list"
    as_of: datetime
    window_s: int
    bucket_s: int
    total: int
    data: list[dict[str, Any]]
    latest: list[dict[str, Any]]


class MoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for and what became of it. `hard` is the limit wished for, `amount` by how much that is above the
    one of then; `given` is by how much it was raised, until `given_until` or for good.
    """

    id: str
    object: str = "quota.request"
    quota_id: str | None
    kind: QuotaKind
    level: QuotaLevel
    model: str | None
    hard: int | None
    amount: int
    until: datetime | None
    reason: str
    state: RequestState
    asked_by: str
    created_at: datetime
    decided_at: datetime | None
    note: str
    given: int | None
    given_until: datetime | None


def quota(limit: Limit, use: LimitUse, zone: tzinfo, now: float) -> Quota:
    """One limit and where it stands."""
    soft, hard = effective(limit, now)
    in_force = [one for one in limit.raises if one.starts_at <= now < one.expires_at]
    return Quota(
        id=limit.quota_id,
        kind=limit.kind,
        level=limit.level,
        model=limit.model or None,
        soft=soft,
        hard=hard,
        declared_soft=limit.soft,
        declared_hard=limit.hard,
        grants=[RaiseNow(amount=one.amount, expires_at=_time(one.expires_at, zone)) for one in in_force],
        window=window_of(limit.kind),
        resets_at=None if use.resets_at is None else _time(use.resets_at, zone),
        used=use.total if use.settled is None else use.settled,
        reserved=use.reserved,
        remaining=None if hard is None or use.total is None else max(0, hard - use.total),
        state=_state(soft, hard, use),
        source=use.source,
        as_of=_time(use.as_of),
        unknown_because=use.why,
        while_redis_is_away=limit.away,
        each_gateway_alone=limit.local,
    )


def quota_forecast(
    limit: Limit, use: LimitUse, told: Forecast, rate: Rate | None, *, zone: tzinfo, now: float
) -> QuotaForecast:
    """One limit's future."""
    return QuotaForecast(
        id=limit.quota_id,
        kind=limit.kind,
        level=limit.level,
        model=limit.model or None,
        outcome=told.outcome,
        exhausts_at=None if told.at is None else _time(told.at, zone),
        resets_at=None if use.resets_at is None else _time(use.resets_at, zone),
        window_s=None if rate is None else rate.window_s,
        n=None if rate is None else rate.n,
        rate_per_s=None if rate is None else rate.per_s,
        used=use.total,
        hard=effective(limit, now)[1],
    )


def refusal_page(refusals: Refusals, now: float) -> RefusalPage:
    """A tenant's refusals with times in UTC."""
    return RefusalPage(
        as_of=_time(now),
        window_s=refusals.window_s,
        bucket_s=refusals.bucket_s,
        total=refusals.total,
        data=[_reason(one) for one in refusals.reasons],
        latest=[_latest(one) for one in refusals.latest],
    )


def more_request(view: QuotaRequestView) -> MoreRequest:
    """A request as its tenant sees it: without who decided."""
    level = QuotaLevel.KEY if view.key else QuotaLevel.PROJECT if view.project else QuotaLevel.TENANT
    return MoreRequest(
        id=str(view.id),
        quota_id=None if view.quota_id is None else str(view.quota_id),
        kind=view.kind,
        level=level,
        model=view.model,
        hard=view.wanted,
        amount=view.amount,
        until=view.until,
        reason=view.reason,
        state=view.state,
        asked_by=view.asked_by,
        created_at=view.created_at,
        decided_at=view.decided_at,
        note=view.note,
        given=view.given,
        given_until=view.given_until,
    )


def window_of(kind: QuotaKind) -> Window:
    """What use of a limit of `kind` adds up over."""
    if kind in SIZES:
        return Window.REQUEST
    match COUNTERS[kind]:
        case Counter.RATE:
            return Window.SLIDING_MINUTE
        case Counter.HELD:
            return Window.IN_FLIGHT
        case _:
            return Window.DAY if kind in DAILY else Window.MONTH


def _state(soft: int | None, hard: int | None, use: LimitUse) -> LimitState:
    if use.source is Source.REQUEST:
        return LimitState.OK
    if use.total is None:
        return LimitState.UNKNOWN
    if hard is not None and use.total >= hard:
        return LimitState.EXHAUSTED
    return LimitState.ABOVE_SOFT if soft is not None and use.total > soft else LimitState.OK


def _reason(one: RefusalCount) -> dict[str, Any]:
    counts = [{"start": _time(start), "count": count} for start, count in one.counts]
    return {
        "object": "quota.refusals",
        "code": one.code,
        "kind": one.kind,
        "quota_id": one.quota_id,
        "count": one.count,
        "counts": counts,
    }


def _latest(one: LatestRefusal) -> dict[str, Any]:
    return {
        "object": "quota.refusal",
        "at": _time(one.at),
        "request_id": one.request_id,
        "key": one.key,
        "code": one.code,
        "kind": one.kind,
        "quota_id": one.quota_id,
        "reason": one.message,
    }


def _time(at: float, zone: tzinfo = UTC) -> datetime:
    return datetime.fromtimestamp(at, zone)
