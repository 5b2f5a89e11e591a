"""Taking a lease whatever the store has forgotten: cold counters are hydrated, windows that moved on computed again,
and counters that hold what nobody will settle are corrected, behind the requests' backs.

Layer: service. It reads no ledger itself; the caller says how one is summed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from controlplane.admission.answers import Cold, ColdCounter, DoubtedCounter, Ended, Granted, OutsideWindows, Refused
from controlplane.admission.charges import Charge
from controlplane.admission.leases import Leases

logger = logging.getLogger(__name__)

ROUNDS = 4
"""Windows moved on, cold counters found, another window begun meanwhile: no honest store needs more."""
CORRECTED_EVERY_S = 15.0
"""From when a counter is seen in doubt until the ledger is summed for it, and between two tries: longer than usage is
on its way."""
MOST_DOUBTED = 1_000
HYDRATED_AT_ONCE, CORRECTED_AT_ONCE = 4, 2
"""Sums of the ledger at once, for requests and behind their backs: its database's other connections are for keys,
limits and the fleet."""
LONGEST_S = 10.0
"""Longest that a request waits for counters to be hydrated, and that a sum behind the requests' backs may take; the
caller's own bound on a sum is shorter, and does not hold where a sum cannot even be given up.
"""

Later = Callable[..., object]
"""Calls a function, with its arguments, so many seconds from now."""
Sum = Callable[[ColdCounter], Awaitable[tuple[int, float]]]
"""Units the ledger has for a counter's limit in [start, stop), and the time until which it surely had all."""


class StoreRestlessError(RuntimeError):
    """The store's counters went cold again and again while they were hydrated."""


class Warmer:
    """Sums the ledger for a cold counter once at a time, however many requests wait for it. A failure is raised to all
    who wait; the next request tries again.
    """

    def __init__(
        self,
        leases: Leases,
        monotonic: Callable[[], float] = time.monotonic,
        later: Later = lambda *call: asyncio.get_running_loop().call_later(*call),
    ) -> None:
        self._leases = leases
        self._monotonic = monotonic
        self._later = later
        self._hydrations = asyncio.Semaphore(HYDRATED_AT_ONCE)
        self._corrections = asyncio.Semaphore(CORRECTED_AT_ONCE)
        self._under_way: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._correct_at: OrderedDict[tuple[str, int], float] = OrderedDict()

    async def acquire(
        self,
        tenant_id: str,
        lease_id: str,
        charges_at: Callable[[float | None], Sequence[Charge]],
        sum_ledger: Sum,
    ) -> Granted | Refused | Ended:
        """`charges_at` gives the charges for the windows that hold a time, Unix seconds; None is the caller's own now.

        Raises what `sum_ledger` raises, TimeoutError, and StoreRestlessError.
        """
        charges = charges_at(None)
        for _ in range(ROUNDS):
            outcome = await self._leases.acquire(tenant_id, lease_id, charges)
            if isinstance(outcome, Cold):
                async with asyncio.timeout(LONGEST_S):
                    await asyncio.gather(*(self._hydrate(tenant_id, one, sum_ledger) for one in outcome.counters))
            elif isinstance(outcome, OutsideWindows):
                charges = charges_at(outcome.now)
            else:
                if isinstance(outcome, Granted | Refused):
                    for one in outcome.doubted:
                        self.doubt(tenant_id, one, sum_ledger)
                return outcome
        raise StoreRestlessError("the store's counters do not stay hydrated")

    async def _hydrate(self, tenant_id: str, counter: ColdCounter, sum_ledger: Sum) -> None:
        name = (counter.charge.key, counter.start)
        task = self._under_way.get(name)
        if task is None:
            task = asyncio.create_task(self._sum_and_hydrate(tenant_id, counter, sum_ledger))
            self._under_way[name] = task
            task.add_done_callback(lambda done: self._ended(name, done))
        await asyncio.shield(task)  # who leaves must not take it from the others

    async def _sum_and_hydrate(self, tenant_id: str, counter: ColdCounter, sum_ledger: Sum) -> None:
        async with self._hydrations:
            base, complete_until = await sum_ledger(counter)
        await self._leases.hydrate(tenant_id, counter, base, complete_until=complete_until)

    def doubt(self, tenant_id: str, counter: DoubtedCounter, sum_ledger: Sum) -> None:
        """Correct the counter when its time has come; no request waits for it, and none need come for the first try."""
        name, now = (counter.charge.key, counter.start), self._monotonic()
        if name in self._under_way:
            return
        if name not in self._correct_at and len(self._correct_at) < MOST_DOUBTED:
            self._later(CORRECTED_EVERY_S, self._still, name, tenant_id, counter, sum_ledger)
        if now < self._correct_at.setdefault(name, now + CORRECTED_EVERY_S):
            if len(self._correct_at) > MOST_DOUBTED:
                self._correct_at.popitem(last=False)
            return
        self._correct_at[name] = now + CORRECTED_EVERY_S
        task = asyncio.create_task(self._sum_and_correct(tenant_id, counter, sum_ledger))
        self._under_way[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    def _still(self, name: tuple[str, int], tenant_id: str, counter: DoubtedCounter, sum_ledger: Sum) -> None:
        if name in self._correct_at:
            self.doubt(tenant_id, counter, sum_ledger)

    async def _sum_and_correct(self, tenant_id: str, counter: DoubtedCounter, sum_ledger: Sum) -> None:
        span = ColdCounter(charge=counter.charge, start=counter.start, stop=counter.since)
        try:
            async with self._corrections, asyncio.timeout(LONGEST_S):
                used, complete_until = await sum_ledger(span)
            if complete_until >= counter.since:
                await self._leases.correct(tenant_id, counter, used)
                self._correct_at.pop((counter.charge.key, counter.start), None)
        except Exception as error:  # nobody waits for it: the next request after a while tries again
            logger.warning("a counter of expired leases could not be corrected: %s", type(error).__name__)

    def _ended(self, name: tuple[str, int], task: asyncio.Task[None]) -> None:
        del self._under_way[name]
        if not task.cancelled():
            task.exception()  # those who waited have it
