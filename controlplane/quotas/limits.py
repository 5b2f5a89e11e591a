"""Which limits a request must respect, and how high they are right now.

Layer: service. Pure: it reads what `service.load_tenant_quotas` answered and never asks anybody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from controlplane.quotas.schemas import Limit, QuotaLevel, TenantQuotas

_LEVELS = tuple(QuotaLevel)


class LimitIndex:
    """One tenant's limits by whose they are, so that a request costs the same however many keys have limits."""

    def __init__(self, quotas: TenantQuotas) -> None:
        found: dict[tuple[QuotaLevel, str], list[Limit]] = defaultdict(list)
        for limit in quotas.limits:
            found[limit.level, limit.scope_id].append(limit)
        self._by_scope = {scope: tuple(limits) for scope, limits in found.items()}
        self._tenant_id = quotas.tenant_id

    def limits_for(self, *, project_id: str, identity: str, model: str) -> tuple[Limit, ...]:
        """Every limit of the tenant, the project and the key, those for any model and those for `model`: all apply."""
        scopes = zip(_LEVELS, (self._tenant_id, project_id, identity), strict=True)
        return tuple(limit for scope in scopes for limit in self._by_scope.get(scope, ()) if limit.model in ("", model))


def limits_for(quotas: TenantQuotas, *, project_id: str, identity: str, model: str) -> tuple[Limit, ...]:
    """Every limit that a request must respect, the tenant's first. For many requests keep a `LimitIndex`."""
    return LimitIndex(quotas).limits_for(project_id=project_id, identity=identity, model=model)


def effective(limit: Limit, now: float) -> tuple[int | None, int | None]:
    """(soft, hard) with every raise in force at `now` (Unix seconds); None where there is none."""
    raised = sum(each.amount for each in limit.raises if each.starts_at <= now < each.expires_at)
    return _plus(limit.soft, raised), _plus(limit.hard, raised)


def lasting(limit: Limit, now: float, until: float) -> tuple[int | None, int | None]:
    """(soft, hard) as at `now`, but no hard one that is lower at `until` already."""
    soft, hard = effective(limit, now)
    return soft, effective(limit, until)[1] if falls(limit, now, until) else hard


def falls(limit: Limit, now: float, until: float) -> bool:
    """Whether the hard limit is lower at `until` than at `now`, because raises end."""
    hard, later = effective(limit, now)[1], effective(limit, until)[1]
    return hard is not None and later is not None and later < hard


def lowest(limit: Limit, now: float, until: float) -> int | None:
    """The least that the hard limit is in [now, until): it falls where raises end."""
    ends = (each.expires_at for each in limit.raises if now < each.expires_at < until)
    return min((hard for at in (now, *ends) if (hard := effective(limit, at)[1]) is not None), default=None)


def next_change(limits: Iterable[Limit], now: float) -> float | None:
    """When a raise of one of `limits` next starts or ends, None when none does."""
    edges = (edge for limit in limits for each in limit.raises for edge in (each.starts_at, each.expires_at))
    return min((edge for edge in edges if edge > now), default=None)


def _plus(amount: int | None, raised: int) -> int | None:
    return None if amount is None else amount + raised
