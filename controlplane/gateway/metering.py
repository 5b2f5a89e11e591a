"""Taking a lease for a request before it is dispatched, and settling it to what the engine said it used.

Layer: service. What a request may use at worst is bounded without a tokenizer (`size`). Where a limit is in the way of
the bound and perhaps not of the prompt's true number of tokens, a replica counts them and the limits are asked once
more; when none can tell, the bound stands. The unused part is given back at settlement. Device time has no bound in
advance: it is neither reserved nor settled here, and counts against money when a counter is next summed from the
ledger. A request that no limit concerns gets a lease without charges and costs no call.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from controlplane.admission.answers import Basis, ColdCounter, Granted, Lease, Refused
from controlplane.admission.charges import MOST, NOTHING, Charge, Use, charges_for, oversized
from controlplane.admission.leases import Leases
from controlplane.admission.warm import StoreRestlessError, Warmer
from controlplane.errors import CapacityError, TidegateError
from controlplane.gateway.asgi import Headers
from controlplane.gateway.body import InferenceBody
from controlplane.gateway.errors import capacity
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.quotas import QuotaDirectory, RequestLimits, TenantLimits
from controlplane.gateway.record import RequestRecord
from controlplane.gateway.refusals import granted_headers, refused, too_large
from controlplane.quotas import money
from controlplane.quotas.limits import effective, falls, lasting
from controlplane.quotas.schemas import Limit, Price, QuotaKind
from controlplane.tenants.schemas import KeyGrant

SUM_TIMEOUT_S = 5.0
"""Longest a request waits for the ledger when the store has forgotten a day's or month's use."""
WAITS = 4
"""How often a wait is worked out anew, because raises end before it does."""

logger = logging.getLogger("tidegate.gateway")


class LedgerSum(Protocol):
    """Units of `counter`'s window that the ledger has of `limit`, and the time until which it surely had all."""

    def __call__(self, grant: KeyGrant, limit: Limit, counter: ColdCounter) -> Awaitable[tuple[int, float]]: ...


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A request's lease. `worst` is what it was taken for; `headers` go on the answer. `prices` are those it was
    reserved by, and by those it is settled: `arrived_at`, Unix seconds, says which.
    """

    lease: Lease
    worst: Use = NOTHING
    headers: Headers = []
    prices: tuple[Price, ...] = ()
    arrived_at: float = 0.0


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an ended request that a replica took: its usage when the engine told all of it, else the tokens
    that were relayed or that the engine wrote by its own word, None when nobody can tell: nothing was said of an answer
    that arrived whole, or the client left one that was not streamed.
    """

    usage_told: bool
    relayed: int | None


class _Blocked(msgspec.Struct, frozen=True):
    """`error` is why. `amends`: a prompt much shorter than its bound would pass."""

    error: TidegateError
    kinds: tuple[QuotaKind, ...]
    amends: bool


class _Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that arrived at `arrived_at` uses at worst, and the fewest tokens that its prompts can have.
    `counted`: that is no bound, they were counted.
    """

    worst: Use
    least_input: int
    counted: bool
    arrived_at: float

    def hides(self, limits: RequestLimits, now: float) -> bool:
        """Whether the bound alone cannot tell if a prompt is longer than one may be at `now`, Unix seconds."""
        if self.counted or not limits.sizes:
            return False
        amounts = [
            amount
            for limit in limits.sizes
            if limit.kind is QuotaKind.MAX_PROMPT_TOKENS
            for amount in effective(limit, now)
            if amount is not None
        ]
        return any(self.least_input <= amount < self.worst.input for amount in amounts)


Count = Callable[[InferenceBody], Awaitable[int | None]]
"""Tokens of a request's prompts as its replica counts them; None when none can tell."""


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

    async def take(self, grant: KeyGrant, request: InferenceBody, count: Count, *, arrived_at: float) -> Held:
        """A lease for the worst case of `request`, at the prices of `arrived_at` (Unix seconds).

        Raises RateLimitedError (429) when a limit is in the way, InvalidRequestError (400) when the request alone is
        larger than one may be, CapacityError (503) when nobody can tell.
        """
        tenant = await self.quotas.of(grant.tenant_id)
        limits = tenant.limits_for(grant, request.model)
        if not limits:
            return Held(lease=_free(grant, self._wall()))
        context = self._fleet.context(request.model, self._assumed_context)
        estimate = _Estimate(
            worst=self._worst(request, request.size.input_tokens(context), limits, tenant, arrived_at),
            least_input=request.size.least_input,
            counted=request.size.exact,
            arrived_at=arrived_at,
        )
        if estimate.hides(limits, self._wall()):
            estimate = await self._counted(request, limits, tenant, estimate, count)
        taken = await self._try(grant, request, limits, tenant, estimate)
        if isinstance(taken, _Blocked) and taken.amends and not estimate.counted:
            estimate = await self._counted(request, limits, tenant, estimate, count)
            if estimate.counted:
                taken = await self._try(grant, request, limits, tenant, estimate)
        if isinstance(taken, Held):
            return taken
        for kind in taken.kinds:
            self._on_refused(kind, taken.error.code)
        raise taken.error

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
        what was relayed: at least one token a chunk. Where that is unknown it counts as reserved: whoever leaves just
        before a whole answer arrives must not have it produced for nothing (F7).
        """
        if counted.usage_told:
            read, cached, output = record.prompt_tokens, record.cached_tokens, record.output_tokens
        elif counted.relayed is not None:
            read, cached, output = held.worst.input, 0, counted.relayed
        else:
            read, cached, output = held.worst.input, 0, held.worst.output
        spent = money.Use(uncached_input=read - cached, cached_input=cached, output=output)
        price = money.settled(held.prices, record.pool, held.arrived_at, spent)
        return Use(input=read, uncached_input=read - cached, output=output, money=min(price, MOST))

    def bound(self, held: Held, request: InferenceBody) -> tuple[int, int]:
        """The most tokens that `request` can read and write."""
        if held.worst is not NOTHING:
            return held.worst.input, held.worst.output
        context = self._fleet.context(request.model, self._assumed_context)
        return request.size.input_tokens(context), request.size.output_tokens(context)

    def _worst(
        self, request: InferenceBody, read: int, limits: RequestLimits, tenant: TenantLimits, arrived_at: float
    ) -> Use:
        """What the request may use at worst when its prompts have `read` tokens."""
        written = request.size.output_tokens(self._fleet.context(request.model, self._assumed_context))
        price = 0
        if limits.of_money:
            use = money.Use(uncached_input=read, output=written)
            price = money.reserved(tenant.quotas.prices, self._fleet.pool_names(request.model), arrived_at, use)
        return Use(input=read, uncached_input=read, output=written, money=min(price, MOST))

    async def _counted(
        self,
        request: InferenceBody,
        limits: RequestLimits,
        tenant: TenantLimits,
        estimate: _Estimate,
        count: Count,
    ) -> _Estimate:
        """The estimate with the prompt's true number; as it was when nobody can tell."""
        read = await count(request)
        if read is None:
            return estimate
        worst = self._worst(request, min(read, MOST), limits, tenant, estimate.arrived_at)
        return _Estimate(worst=worst, least_input=worst.input, counted=True, arrived_at=estimate.arrived_at)

    def _amends(
        self, estimate: _Estimate, outcome: Refused, request: InferenceBody, limits: RequestLimits, tenant: TenantLimits
    ) -> bool:
        """Whether all that refused the bound might let the true number pass."""
        if estimate.counted:
            return False
        least = self._worst(request, estimate.least_input, limits, tenant, estimate.arrived_at)
        return all(not one.away and one.used + least.units(one.kind) <= one.limit for one in outcome.refusals)

    async def _try(
        self,
        grant: KeyGrant,
        request: InferenceBody,
        limits: RequestLimits,
        tenant: TenantLimits,
        estimate: _Estimate,
    ) -> Held | _Blocked:
        """Take a lease for the estimate's worst case. Raises TidegateError when nobody can tell."""
        now = self._wall()
        oversize = oversized(limits.sizes, estimate.worst, lambda limit: effective(limit, now)) if limits.sizes else ()
        if oversize and oversize[0].hard:
            error = too_large(oversize[0], request.size_params, counted=estimate.counted)
            return _Blocked(error, (oversize[0].kind,), amends=False)
        if len(limits.sizes) == len(limits):
            granted = Granted(lease=_free(grant, now), standings=())
        else:
            outcome = await self._acquire(grant, limits, tenant, estimate.worst)
            if isinstance(outcome, Refused):
                kinds = tuple(one.kind for one in outcome.refusals)
                amends = self._amends(estimate, outcome, request, limits, tenant)
                return _Blocked(refused(outcome), kinds, amends=amends)
            granted = outcome
        known = [one for one in oversize if estimate.counted or one.kind is not QuotaKind.MAX_PROMPT_TOKENS]
        return Held(
            lease=granted.lease,
            worst=estimate.worst,
            headers=granted_headers(granted, known),
            prices=tenant.quotas.prices if limits.of_money else (),
            arrived_at=estimate.arrived_at,
        )

    async def _acquire(
        self, grant: KeyGrant, limits: RequestLimits, tenant: TenantLimits, worst: Use
    ) -> Granted | Refused:
        """A raise that ends before the wait is over does not count: what is said to pass then must
        pass under the limits of then (F11).
        """
        wait_s = 0.0
        for _ in range(WAITS):
            outcome = await self._ask(grant, limits, tenant, worst, wait_s)
            if isinstance(outcome, Granted):
                return outcome
            longer_s = None if outcome.away else outcome.retry_after_s
            if longer_s is None or longer_s <= wait_s or not self._falls(limits, longer_s):
                break
            wait_s = longer_s
        return outcome

    def _falls(self, limits: RequestLimits, wait_s: float) -> bool:
        now = self._wall()
        return any(falls(limit, now, now + wait_s) for limit in limits)

    async def _ask(
        self, grant: KeyGrant, limits: RequestLimits, tenant: TenantLimits, worst: Use, wait_s: float
    ) -> Granted | Refused:
        """A lease within the limits of now and of `wait_s` later. Raises CapacityError (503)."""

        def charges_at(at: float | None) -> tuple[Charge, ...]:
            now = self._wall() if at is None else at
            if not wait_s:
                return tenant.charges(limits, worst, now)
            return charges_for(
                grant.tenant_id, limits, worst, tenant.windows(now), lambda limit: lasting(limit, now, now + wait_s)
            )

        async def summed(counter: ColdCounter) -> tuple[int, float]:
            limit = tenant.limit(counter.charge.quota_id)
            async with asyncio.timeout(SUM_TIMEOUT_S):
                return await self._sum(grant, limit, counter)

        try:
            outcome = await self._warmer.acquire(grant.tenant_id, f"{random.getrandbits(128):032x}", charges_at, summed)
        except TidegateError:
            raise
        except Exception as error:
            raise self._unsure(error) from error
        if not isinstance(outcome, Granted | Refused):
            raise self._unsure(outcome)
        return outcome

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
