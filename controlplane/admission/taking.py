"""Taking leases and more for them: from the store, or by each limit's declared mode while it is away.

Layer: service. It never admits what a limit does not allow; what was asked for and not taken is said to the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from controlplane.admission import wire
from controlplane.admission.answers import (
    Acquired,
    Basis,
    Cold,
    Ended,
    Ending,
    Extended,
    Granted,
    Lease,
    Refusal,
    Refused,
    Standing,
    refused,
    soft_warnings,
    standing_of,
)
from controlplane.admission.asking import Silence, Store
from controlplane.admission.charges import NOTHING, Charge
from controlplane.admission.ending import Endings
from controlplane.admission.holding import Holdings
from controlplane.admission.local import RETRY_S, LocalCounters, local_limit
from controlplane.admission.tally import Tally
from controlplane.quotas.schemas import Away


class Takings:
    """Those of one process, which is `holder` to the store."""

    def __init__(
        self,
        store: Store,
        local: LocalCounters,
        holdings: Holdings,
        endings: Endings,
        *,
        holder: str,
        wall: Callable[[], float],
        tally: Tally,
    ) -> None:
        self.clock_offset_s = 0.0
        """How far this process's clock is ahead of the store's, as of the last lease taken."""
        self._store = store
        self._local = local
        self._holdings = holdings
        self._endings = endings
        self._holder = holder
        self._wall = wall
        self._tally = tally
        self._steps = itertools.count(1)

    def next_step(self) -> int:
        """Names one extension."""
        return next(self._steps)

    def wanted(self, tenant_id: str, lease_id: str, charges: Sequence[Charge], ttl_s: float) -> Lease:
        """The lease as it would be if this process counted it alone."""
        now = self._wall()
        return Lease(
            lease_id=lease_id,
            tenant_id=tenant_id,
            charges=tuple(charges),
            basis=Basis.LOCAL,
            fence=0,
            epoch=0,
            taken_at=now,
            expires_at=now + ttl_s,
            ttl_s=ttl_s,
        )

    async def acquire(self, wanted: Lease) -> Acquired:
        """Take all charges of `wanted` or none."""
        charges = wanted.charges
        words = [wanted.lease_id, self._holder, wire.micros(wanted.ttl_s), wire.charge_words(charges)]
        try:
            answer = await self._store.ask("acquire", wanted.tenant_id, [charge.key for charge in charges], words)
        except BaseException:
            self._endings.tell(wanted, NOTHING)
            raise
        if isinstance(answer, Silence):
            return self._acquire_away(wanted, answer)
        outcome = self._taken(wanted, charges, answer)
        if isinstance(outcome, Granted):
            if outcome.repeated and wanted.lease_id in self._holdings:
                return msgspec.structs.replace(outcome, lease=self._holdings.latest(outcome.lease))
            if not outcome.repeated:
                self.clock_offset_s = self._wall() - outcome.lease.taken_at
            self._holdings.keep(outcome.lease)
        return outcome

    async def extend(self, lease: Lease, charges: Sequence[Charge], ttl_s: float | None, step: int) -> Extended:
        """Take `charges` more for the lease or nothing, and keep it for longer."""
        lease = self._holdings.latest(lease)
        if lease.basis is Basis.STORE:
            outcome = await self._extend(lease, charges, ttl_s, step)
            if outcome != Ended(why=Ending.LOST):
                return outcome
        brought = await self._holdings.bring(lease)
        if isinstance(brought, Ended):
            return brought
        return await self._extend(brought, charges, ttl_s, step)

    def _taken(self, lease: Lease, asked: Sequence[Charge], answer: list[object]) -> Extended:
        if answer[0] == "granted":
            self._tally.granted += 1
            return wire.granted(lease, asked, answer)
        outcome = wire.obstacle(lease.tenant_id, asked, answer)
        if isinstance(outcome, Refused):
            self._tally.refused += 1
        elif isinstance(outcome, Cold):
            self._tally.cold += 1
        elif isinstance(outcome, Ended) and outcome.why is Ending.FENCED:
            self._tally.fenced += 1
        return outcome

    def _acquire_away(self, wanted: Lease, silence: Silence) -> Granted | Refused:
        outcome = self._without_store(wanted, wanted.charges)
        if isinstance(outcome, Granted):
            self._holdings.keep(outcome.lease)
        elif silence is Silence.NOT_ANSWERED:
            self._endings.tell(wanted, NOTHING)
        return outcome

    async def _extend(self, lease: Lease, charges: Sequence[Charge], ttl_s: float | None, step: int) -> Extended:
        more = charges if step > lease.step else ()
        held = _merged(lease.charges, more)
        longer = msgspec.structs.replace(lease, charges=held, ttl_s=ttl_s or lease.ttl_s, step=max(step, lease.step))
        if lease.basis is Basis.LOCAL:
            return self._extend_away(longer, more)
        asked = charges or [msgspec.structs.replace(charge, amount=0) for charge in lease.charges]
        known = [lease.fence, step, lease.epoch, wire.micros(lease.expires_at)]
        words = [lease.lease_id, self._holder, wire.micros(longer.ttl_s), wire.charge_words(asked), *known]
        answer = await self._store.ask("extend", lease.tenant_id, [charge.key for charge in asked], words)
        if isinstance(answer, Silence):
            return self._extend_away(longer, more)
        outcome = self._taken(longer, asked, answer)
        if isinstance(outcome, Granted):
            self._holdings.renew(outcome.lease)
        return outcome

    def _extend_away(self, longer: Lease, charges: Sequence[Charge]) -> Granted | Refused:
        outcome = self._without_store(longer, charges)
        if isinstance(outcome, Granted):
            self._holdings.renew(longer)
        return outcome

    def _without_store(self, lease: Lease, charges: Sequence[Charge]) -> Granted | Refused:
        """What the limits that have something to say declare for this."""
        binding = [charge for charge in charges if charge.hard is not None and charge.amount > 0]
        closed = [_closed(charge) for charge in binding if charge.away is Away.CLOSED]
        counted = [charge for charge in binding if charge.away is Away.LOCAL]
        refusals = closed or self._local.take(lease.lease_id, counted, lease.ttl_s)
        standings = tuple(self._local_standing(charge) for charge in counted)
        if refusals:
            self._tally.away_refused += 1
            return refused(refusals, standings)
        uncounted = tuple(charge.quota_id for charge in binding if charge.away is Away.OPEN)
        if uncounted:
            self._tally.away_open += 1
        if counted:
            self._tally.away_local += 1
        used = [self._local.used(charge) for charge in counted]
        return Granted(lease=lease, standings=standings, warnings=soft_warnings(counted, used), uncounted=uncounted)

    def _local_standing(self, charge: Charge) -> Standing:
        return standing_of(
            msgspec.structs.replace(charge, hard=local_limit(charge)), self._local.used(charge), reset_s=RETRY_S
        )


def _merged(held: Sequence[Charge], more: Sequence[Charge]) -> tuple[Charge, ...]:
    """The charges of a lease that was extended, one for each counter."""
    by_key = {charge.key: charge for charge in held}
    for charge in more:
        before = by_key.get(charge.key)
        amount = charge.amount + (before.amount if before is not None else 0)
        by_key[charge.key] = msgspec.structs.replace(charge, amount=amount)
    return tuple(by_key.values())


def _closed(charge: Charge) -> Refusal:
    return Refusal(
        quota_id=charge.quota_id,
        level=charge.level,
        kind=charge.kind,
        limit=charge.hard or 0,
        used=0,
        amount=charge.amount,
        retry_after_s=RETRY_S,
        exact=False,
        away=True,
    )
