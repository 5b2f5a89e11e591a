"""Taking a lease for a request before it is dispatched, and settling it to what the engine said it used.

Layer: service. What a request may use at worst is bounded without a tokenizer (`size`), so a limit that is nearly used
up may refuse a request that an exact count would let pass; the unused part is given back at settlement. Device time has
no bound in advance: it is neither reserved nor settled here, and counts against money when a counter is next summed
from the ledger. A request that no limit concerns gets a lease without charges and costs no call.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from controlplane.admission.answers import Basis, ColdCounter, Granted, Lease, Refused
from controlplane.admission.charges import MOST, NOTHING, SIZES, Charge, Use, oversized
from controlplane.admission.leases import Leases
from controlplane.admission.warm import StoreRestlessError, Warmer
from controlplane.errors import CapacityError, TidegateError
from controlplane.gateway.asgi import Headers
from controlplane.gateway.body import InferenceBody
from controlplane.gateway.errors import capacity
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.quotas import QuotaDirectory, TenantLimits
from controlplane.gateway.record import RequestRecord
from controlplane.gateway.refusals import granted_headers, refused, too_large
from controlplane.quotas import money
from controlplane.quotas.limits import effective
from controlplane.quotas.schemas import Limit, Price, QuotaKind
from controlplane.tenants.schemas import KeyGrant

SUM_TIMEOUT_S = 5.0
"""Longest a request waits for the ledger when the store has forgotten a day's or month's use."""
MONEY = frozenset({QuotaKind.MONEY_PER_DAY, QuotaKind.MONEY_PER_MONTH})

logger = logging.getLogger("tidegate.gateway")


class LedgerSum(Protocol):
    """Units of `counter`'s window that the ledger has of `limit`, and the time until which it surely had all."""

    def __call__(
        self, grant: KeyGrant, limit: Limit, counter: ColdCounter, prices: Sequence[Price]
    ) -> Awaitable[tuple[int, float]]: ...


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A request's lease. `worst` is what it was taken for; `headers` go on the answer."""

    lease: Lease
    worst: Use = NOTHING
    headers: Headers = []
    prices: tuple[Price, ...] = ()


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an ended request that a replica took: its usage when the engine told it, else the tokens that
    were relayed, None when nothing was said of an answer that arrived whole.
    """

    usage_told: bool
    relayed: int | None


class Meter:
    """`leases` are the process's; `sum_ledger` hydrates what the store has forgotten. `on_refused` is told of each
    limit that was in the way. `assumed_context` is of models whose replicas have not told theirs.
    """

    def __init__(
        self,
        leases: Leases,
        quotas: QuotaDirectory,
        fleet: FleetDirectory,
        sum_ledger: LedgerSum,
        *,
        assumed_context: int,
        on_refused: Callable[[QuotaKind, str], None] = lambda kind, code: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.leases = leases
        self.quotas = quotas
        self._fleet = fleet
        self._sum = sum_ledger
        self._warmer = Warmer(leases)
        self._assumed_context = assumed_context
        self._on_refused = on_refused
        self._wall = wall

    async def take(self, grant: KeyGrant, request: InferenceBody) -> Held:
        """A lease for the worst case of `request`. Raises RateLimitedError (429) when a limit is in the way,
        InvalidRequestError (400) when the request alone is larger than one may be, CapacityError (503) when nobody can
        tell.
        """
        tenant = await self.quotas.of(grant.tenant_id)
        limits = tenant.limits_for(grant, request.model)
        if not limits:
            return Held(lease=_free(grant, self._wall()))
        now = self._wall()
        worst = self._worst(request, limits, tenant, now)
        oversize = oversized(limits, worst, lambda limit: effective(limit, now))
        if oversize and oversize[0].hard:
            error = too_large(oversize[0], request.size_params)
            self._on_refused(oversize[0].kind, error.code)
            raise error
        if all(limit.kind in SIZES for limit in limits):
            granted = Granted(lease=_free(grant, now), standings=())
        else:
            granted = await self._acquire(grant, limits, tenant, worst)
        return Held(
            lease=granted.lease,
            worst=worst,
            headers=granted_headers(granted, oversize),
            prices=tenant.quotas.prices if any(limit.kind in MONEY for limit in limits) else (),
        )

    async def settle(self, held: Held, use: Use) -> None:
        """End the lease with what was used, once. The store is told later when it is away."""
        if not held.lease.charges:
            return
        try:
            await self.leases.settle(held.lease, use)
        except Exception:
            logger.exception("A lease could not be settled", extra={"lease_id": held.lease.lease_id})

    def used(self, held: Held, record: RequestRecord, counted: Counted) -> Use:
        """What a request that a replica took has used.

        Without the engine's word the prompt counts as reserved, because the replica was given it, and the output as
        what was relayed: at least one token a chunk. An answer that arrived whole and says nothing counts as reserved.
        """
        if counted.usage_told:
            read, cached, output = record.prompt_tokens, record.cached_tokens, record.output_tokens
        elif counted.relayed is not None:
            read, cached, output = held.worst.input, 0, counted.relayed
        else:
            read, cached, output = held.worst.input, 0, held.worst.output
        spent = money.Use(uncached_input=read - cached, cached_input=cached, output=output)
        price = money.settled(held.prices, record.pool, self._wall(), spent)
        return Use(input=read, uncached_input=read - cached, output=output, money=min(price, MOST))

    def _worst(self, request: InferenceBody, limits: Sequence[Limit], tenant: TenantLimits, now: float) -> Use:
        context = self._fleet.context(request.model, self._assumed_context)
        read, written = request.size.input_tokens(context), request.size.output_tokens(context)
        price = 0
        if any(limit.kind in MONEY for limit in limits):
            use = money.Use(uncached_input=read, output=written)
            price = money.reserved(tenant.quotas.prices, self._fleet.pool_names(request.model), now, use)
        return Use(input=read, uncached_input=read, output=written, money=min(price, MOST))

    async def _acquire(self, grant: KeyGrant, limits: tuple[Limit, ...], tenant: TenantLimits, worst: Use) -> Granted:
        def charges_at(at: float | None) -> tuple[Charge, ...]:
            return tenant.charges(limits, worst, self._wall() if at is None else at)

        async def summed(counter: ColdCounter) -> tuple[int, float]:
            limit = tenant.limit(counter.charge.quota_id)
            async with asyncio.timeout(SUM_TIMEOUT_S):
                return await self._sum(grant, limit, counter, tenant.quotas.prices)

        try:
            outcome = await self._warmer.acquire(grant.tenant_id, f"{random.getrandbits(128):032x}", charges_at, summed)
        except TidegateError:
            raise
        except Exception as error:
            raise self._unsure(error) from error
        if isinstance(outcome, Granted):
            return outcome
        if not isinstance(outcome, Refused):
            raise self._unsure(outcome)
        refusal = refused(outcome)
        for one in outcome.refusals:
            self._on_refused(one.kind, refusal.code)
        raise refusal

    def _unsure(self, why: object) -> CapacityError:
        """Neither granted nor refused: the ledger could not be summed, or the store is in disorder."""
        known = isinstance(why, TimeoutError | OSError | StoreRestlessError)
        logger.warning("A quota's use could not be told (%s)", type(why).__name__, exc_info=None if known else True)
        return capacity("What has been used of a quota cannot be told at the moment; try again.", "quota_use_unknown")


def _free(grant: KeyGrant, now: float) -> Lease:
    """The lease of a request that takes nothing from any limit."""
    return Lease(
        lease_id="",
        tenant_id=grant.tenant_id,
        charges=(),
        basis=Basis.LOCAL,
        fence=0,
        epoch=0,
        taken_at=now,
        expires_at=now,
        ttl_s=0.0,
    )
