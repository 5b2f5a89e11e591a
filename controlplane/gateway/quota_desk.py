"""What `/v1/quota` asks of Postgres, within bounds that keep it from being a lever.

Layer: service. Each question is one short transaction, few run at once and none for long; a Postgres that is away or
busy is 503 at once, never a wait. It must never be asked on the way of an inference request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.admission.charges import COUNTERS, DAILY, MONEY, Counter
from controlplane.db import transaction
from controlplane.errors import InvalidRequestError, TidegateError
from controlplane.gateway.errors import capacity
from controlplane.ledger.schemas import UsageSum
from controlplane.ledger.service import sum_since
from controlplane.outage import unstorable
from controlplane.paging import Page
from controlplane.quotas import request_service
from controlplane.quotas.forecast import Rate
from controlplane.quotas.request_service import Asker
from controlplane.quotas.schemas import Limit, QuotaKind, QuotaLevel
from controlplane.quotas.views import MoreSpec, QuotaRequestView
from controlplane.telemetry.refusals import Refusals
from controlplane.telemetry.refusals import read as read_refusals
from controlplane.tenants.schemas import KeyGrant

AT_ONCE = 3
"""Of the process's connections; the others are for keys, limits and the fleet."""
WAITING = 32
LONGEST_S = 2.5
LAG_S = 10.0
"""A rate ends this long ago: later usage may still be on its way to the ledger."""
MINUTES_BACK_S = 300.0
DAY_BACK_S = 3600.0
MONTH_BACK = timedelta(days=2)
"""How far back a rate looks, by what the limit counts; a month's from a midnight (UTC), so that daily sums tell it."""

_UNITS: dict[QuotaKind, Callable[[UsageSum], int]] = {
    QuotaKind.REQUESTS_PER_MINUTE: lambda used: used.attempts,
    QuotaKind.INPUT_TOKENS_PER_MINUTE: lambda used: used.prompt_tokens,
    QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE: lambda used: used.uncached_tokens,
    QuotaKind.OUTPUT_TOKENS_PER_MINUTE: lambda used: used.output_tokens,
}

logger = logging.getLogger("tidegate.gateway")


class _Whose(NamedTuple):
    """Whose usage a limit counts."""

    tenant: str
    project: str | None
    key_identity: str | None
    model: str | None


class QuotaDesk:
    """Reads and writes for tenants' keys. Every method raises CapacityError (503) when Postgres cannot answer now."""

    def __init__(self, engine: AsyncEngine, *, wall: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._wall = wall
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def rates(self, grant: KeyGrant, limits: Sequence[Limit]) -> dict[str, Rate]:
        """The recent rate of each of `limits`, by its id. Few queries for each scope and span among them."""
        async with self._session() as session:
            sums: dict[tuple[object, ...], UsageSum] = {}
            found = {}
            for limit in limits:
                since, until, window_s = self._span(limit.kind)
                whose = _Whose(grant.tenant, _project(grant, limit), _identity(limit), limit.model or None)
                name = (*whose, window_s)
                if name not in sums:
                    sums[name] = await sum_since(session, **whose._asdict(), since=since, until=until)
                used = sums[name]
                units = used.cost if limit.kind in MONEY else _UNITS.get(limit.kind, _tokens)(used)
                found[limit.quota_id] = Rate(units=units, n=used.attempts, window_s=window_s)
            return found

    async def refusals(self, grant: KeyGrant, window_s: int) -> Refusals:
        """The tenant's refusals. Raises InvalidRequestError for a window that is not kept."""
        async with self._session() as session:
            return await read_refusals(session, grant.tenant, window_s=window_s, clock=self._wall)

    async def ask(self, grant: KeyGrant, spec: MoreSpec, idempotency_key: str | None) -> QuotaRequestView:
        """Ask for more of a limit."""
        async with self._session() as session:
            return await request_service.ask_with_key(session, _asker(grant), spec, idempotency_key=idempotency_key)

    async def requests(self, grant: KeyGrant, *, after: str | None, limit: int) -> Page[QuotaRequestView]:
        """What was asked for of limits that the key meets."""
        async with self._session() as session:
            return await request_service.list_with_key(session, _asker(grant), after=after, limit=limit)

    async def request(self, grant: KeyGrant, request_id: UUID) -> QuotaRequestView:
        """One of them. Raises NotFoundError."""
        async with self._session() as session:
            return await request_service.get_with_key(session, _asker(grant), request_id)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[AsyncSession]:
        if self._waiting >= WAITING:
            raise capacity("Too many ask about quotas at the moment; try again.", "quota_api_busy")
        self._waiting += 1
        try:
            async with asyncio.timeout(LONGEST_S), self._slots, transaction(self._engine) as session:
                yield session
        except TidegateError:
            raise
        except Exception as error:
            if unstorable(error):
                raise InvalidRequestError("The request holds a character that cannot be stored.") from error
            logger.warning("A tenant's question about quotas was not answered: %s", type(error).__name__)
            raise capacity("Quotas cannot be looked up at the moment; try again.", "policy_unavailable") from error
        finally:
            self._waiting -= 1

    def _span(self, kind: QuotaKind) -> tuple[datetime, datetime | None, float]:
        """[since, until) of a rate, and its seconds."""
        now = datetime.fromtimestamp(self._wall(), UTC)
        if COUNTERS[kind] is Counter.CALENDAR and kind not in DAILY:
            since = now.replace(hour=0, minute=0, second=0, microsecond=0) - MONTH_BACK
            return since, None, (now - since).total_seconds()
        window_s = MINUTES_BACK_S if COUNTERS[kind] is Counter.RATE else DAY_BACK_S
        until = now - timedelta(seconds=LAG_S)
        return until - timedelta(seconds=window_s), until, window_s


def _tokens(used: UsageSum) -> int:
    return used.prompt_tokens + used.output_tokens


def _project(grant: KeyGrant, limit: Limit) -> str | None:
    """The project whose usage a limit counts. `grant` is of a key that meets it, and so names it."""
    return grant.project if limit.level is QuotaLevel.PROJECT else None


def _identity(limit: Limit) -> str | None:
    return limit.scope_id if limit.level is QuotaLevel.KEY else None


def _asker(grant: KeyGrant) -> Asker:
    return Asker(tenant_id=UUID(grant.tenant_id), project=grant.project, identity=grant.identity, key_id=grant.key_id)
