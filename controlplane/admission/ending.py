"""Ending leases, exactly once each, whether the store can be told now or only later.

Layer: service. What the store was not told waits in an outbox; a repeat is harmless even when the store was lost in
between. It never decides what a lease is settled to.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from redis.exceptions import ResponseError

from controlplane.admission import wire
from controlplane.admission.answers import Ended, Ending, Lease, Settled
from controlplane.admission.asking import Silence, Store
from controlplane.admission.charges import Use
from controlplane.admission.errands import Errands
from controlplane.admission.outbox import EndedLease, Outbox
from controlplane.admission.tally import Tally

logger = logging.getLogger(__name__)

MOST_SETTLED = 10_000
"""Endings a process remembers, so that a repeat is harmless even when the store was lost in between."""


class Endings:
    """Those of one process, which is `holder` to the store; `wall` is its clock, Unix seconds."""

    def __init__(self, store: Store, *, holder: str, wall: Callable[[], float], tally: Tally, errands: Errands) -> None:
        self._store = store
        self._holder = holder
        self._wall = wall
        self._tally = tally
        self._errands = errands
        self._outbox = Outbox()
        self._settled: OrderedDict[str, Settled] = OrderedDict()

    @property
    def deferred(self) -> int:
        """Those that wait for the store."""
        return len(self._outbox)

    @property
    def dropped(self) -> int:
        """Those the store will never be told: too many waited."""
        return self._outbox.dropped

    def before(self, lease_id: str) -> Settled | None:
        """How the lease was ended by this process, as far as it remembers."""
        return self._settled.get(lease_id)

    async def end(self, lease: Lease, use: Use) -> Settled | Ended:
        """Tell the store now, or later when it is away or this is cancelled."""
        ended = EndedLease(lease=lease, use=use, ended_at=self._wall())
        try:
            outcome = await self._send(ended)
        except BaseException:
            self._put(ended)
            raise
        if outcome is None:
            self._tally.deferred += 1
            self._outbox.put(ended)
            return Settled(deferred=True)
        return outcome

    def tell(self, lease: Lease, use: Use) -> None:
        """Have the store told soon, without waiting for it."""
        self._put(EndedLease(lease=lease, use=use, ended_at=self._wall()))

    def flush(self) -> None:
        """Begin to tell what waits, if anything does."""
        if self._outbox:
            self._errands.start("outbox", self._empty_outbox)

    async def _send(self, ended: EndedLease) -> Settled | Ended | None:
        lease = ended.lease
        known = [lease.fence, lease.epoch, wire.micros(lease.expires_at), wire.micros(ended.ended_at)]
        words = [lease.lease_id, self._holder, *known, wire.use_words(lease, ended.use)]
        answer = await self._store.ask("settle", lease.tenant_id, [charge.key for charge in lease.charges], words)
        if isinstance(answer, Silence):
            return None
        outcome = wire.settled(lease, answer)
        if isinstance(outcome, Settled):
            self._remember(lease.lease_id, outcome)
        elif outcome.why is Ending.FENCED:
            self._tally.fenced += 1
        return outcome

    def _remember(self, lease_id: str, outcome: Settled) -> None:
        self._settled[lease_id] = msgspec.structs.replace(outcome, repeated=True)
        if len(self._settled) > MOST_SETTLED:
            self._settled.popitem(last=False)
        self._tally.settled += 1
        self._tally.late += outcome.late
        self._tally.overrun_units += sum(one.units for one in outcome.overruns)

    def _put(self, ended: EndedLease) -> None:
        self._tally.deferred += 1
        self._outbox.put(ended)
        self.flush()

    async def _empty_outbox(self) -> None:
        """Ends at the first silence: the next answer of the store, or the next beat, starts it again."""
        while self._outbox:
            ended = self._outbox.take()
            try:
                told = await self._send(ended)
            except ResponseError:
                logger.exception("the store cannot settle a lease")
                continue
            except BaseException:
                self._outbox.put_back(ended)
                raise
            if told is None:
                self._outbox.put_back(ended)
                return
