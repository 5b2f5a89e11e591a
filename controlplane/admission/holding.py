"""Holding on to the leases of requests in flight: renewed while they run, made again when the store was lost.

Layer: service. A tenant whose leases may be unknown to the store is in doubt until they were told to it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from controlplane.admission import wire
from controlplane.admission.answers import HELD_ON, Ended, Ending, Holding, Lease, Reasserted, Unavailable
from controlplane.admission.asking import Silence, Store
from controlplane.admission.errands import Errands
from controlplane.admission.local import LocalCounters
from controlplane.admission.tally import Tally

logger = logging.getLogger(__name__)

TOGETHER = 64
"""Leases said to be still held in one call."""
MOST_TENANTS = 10_000


class Holdings:
    """Those of one process, which is `holder` to the store. A lease older than `longest_s` is not kept alive."""

    def __init__(
        self,
        store: Store,
        local: LocalCounters,
        *,
        holder: str,
        longest_s: float,
        wall: Callable[[], float],
        tally: Tally,
        errands: Errands,
    ) -> None:
        self._store = store
        self._local = local
        self._holder = holder
        self._longest_s = longest_s
        self._wall = wall
        self._tally = tally
        self._errands = errands
        self._held: dict[str, Lease] = {}
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._doubted: set[str] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._held

    def keep(self, lease: Lease) -> None:
        """It is held from now on."""
        self._held[lease.lease_id] = lease

    def renew(self, lease: Lease) -> None:
        """It is now this, if it is still held."""
        if lease.lease_id in self._held:
            self._held[lease.lease_id] = lease

    def latest(self, lease: Lease) -> Lease:
        """The lease as it is now; as the caller knows it when it is not held."""
        return self._held.get(lease.lease_id, lease)

    def let_go(self, lease: Lease) -> Lease:
        """`latest`, and it is held no more."""
        return self._held.pop(lease.lease_id, lease)

    async def reassert(self, leases: Sequence[Lease]) -> tuple[Reasserted, ...] | Unavailable:
        """Say that `leases` are still held, some at a time."""
        by_id: dict[str, Reasserted] = {}
        by_tenant: dict[str, list[Lease]] = {}
        for lease in leases:
            by_tenant.setdefault(lease.tenant_id, []).append(self.latest(lease))
        for tenant_id, owned in by_tenant.items():
            for start in range(0, len(owned), TOGETHER):
                told = await self._reassert(tenant_id, owned[start : start + TOGETHER])
                if told is None:
                    return Unavailable()
                by_id.update((one.lease.lease_id, one) for one in told)
        return tuple(by_id[lease.lease_id] for lease in leases)

    async def bring(self, lease: Lease) -> Lease | Ended:
        """A lease this process counted alone, as the store has it if the store answers."""
        told = await self._reassert(lease.tenant_id, [lease])
        if told is None:
            return lease
        return told[0].lease if told[0].state in HELD_ON else Ended(why=Ending(told[0].state.value))

    def heard(self, tenant_id: str, answer: list[Any], was_away: bool) -> None:
        """The store answered: it is back, or it is another one than before, and what it does not know it is told."""
        if was_away:
            self._doubt_all()
        if answer[0] not in {"outside", "ended"}:
            known, epoch = self._epochs.get(tenant_id), answer[1]
            self._epochs[tenant_id] = epoch
            self._epochs.move_to_end(tenant_id)
            if len(self._epochs) > MOST_TENANTS:
                self._epochs.popitem(last=False)
            if known is not None and known != epoch:
                self._doubted.add(tenant_id)
        if self._doubted:
            self._errands.start("doubts", self._resolve_doubts)

    async def beat(self) -> None:
        """Renew all leases in flight."""
        self._doubt_all()
        await self._resolve_doubts()

    def _doubt_all(self) -> None:
        self._doubted.update(lease.tenant_id for lease in self._held.values())

    async def _resolve_doubts(self) -> None:
        while self._doubted:
            tenant_id = self._doubted.pop()
            oldest = self._wall() - self._longest_s
            leases = [one for one in self._held.values() if one.tenant_id == tenant_id and one.taken_at > oldest]
            for lease in leases:
                self._local.renew(lease.lease_id, lease.ttl_s)
            try:
                if leases and isinstance(await self.reassert(leases), Unavailable):
                    return
            except ResponseError:  # one tenant's trouble ends neither the others' leases nor the heartbeat
                logger.exception("the store cannot renew a tenant's leases")

    async def _reassert(self, tenant_id: str, leases: Sequence[Lease]) -> list[Reasserted] | None:
        counters = list(dict.fromkeys(charge.key for lease in leases for charge in lease.charges))
        places = {key: place for place, key in enumerate(counters, wire.FIRST_COUNTER)}
        words = [self._holder, [wire.held_words(lease, places) for lease in leases]]
        answer = await self._store.ask("reassert", tenant_id, counters, words)
        if isinstance(answer, Silence):
            return None
        told = [wire.reasserted(lease, answer[1], one) for lease, one in zip(leases, answer[3], strict=True)]
        for one in told:
            self._learned(one)
        return told

    def _learned(self, told: Reasserted) -> None:
        self._tally.reasserted += told.state in {Holding.REVIVED, Holding.RECREATED}
        if told.state in HELD_ON:
            self.renew(told.lease)
        else:
            self._held.pop(told.lease.lease_id, None)
