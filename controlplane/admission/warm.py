"""Taking a lease whatever the store has forgotten: cold counters are hydrated and windows that moved on computed again.

Layer: service. It reads no ledger itself; the caller says how one is summed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from controlplane.admission.answers import Cold, ColdCounter, Ended, Granted, OutsideWindows, Refused
from controlplane.admission.charges import Charge
from controlplane.admission.leases import Leases

ROUNDS = 4
"""Windows moved on, cold counters found, another window begun meanwhile: no honest store needs more."""

Sum = Callable[[ColdCounter], Awaitable[tuple[int, float]]]
"""Units the ledger has for a counter's limit in [start, stop), and the time until which it surely had all."""


class StoreRestlessError(RuntimeError):
    """The store's counters went cold again and again while they were hydrated."""


class Warmer:
    """Sums the ledger for a cold counter once at a time, however many requests wait for it. A failure is raised to all
    who wait; the next request tries again.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._under_way: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def acquire(
        self,
        tenant_id: str,
        lease_id: str,
        charges_at: Callable[[float | None], Sequence[Charge]],
        sum_ledger: Sum,
    ) -> Granted | Refused | Ended:
        """`charges_at` gives the charges for the windows that hold a time, Unix seconds; None is the caller's own now.

        Raises what `sum_ledger` raises, and StoreRestlessError.
        """
        charges = charges_at(None)
        for _ in range(ROUNDS):
            outcome = await self._leases.acquire(tenant_id, lease_id, charges)
            if isinstance(outcome, Cold):
                await asyncio.gather(*(self._hydrate(tenant_id, one, sum_ledger) for one in outcome.counters))
            elif isinstance(outcome, OutsideWindows):
                charges = charges_at(outcome.now)
            else:
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
        base, complete_until = await sum_ledger(counter)
        await self._leases.hydrate(tenant_id, counter, base, complete_until=complete_until)

    def _ended(self, name: tuple[str, int], task: asyncio.Task[None]) -> None:
        del self._under_way[name]
        if not task.cancelled():
            task.exception()  # those who waited have it
