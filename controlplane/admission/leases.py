"""Leases on quotas: taken before work starts, settled to what the engine produced (DESIGN §4).

Layer: service. One Lua call takes everything a request needs or nothing, in the store that all gateways share. It never
waits longer than its deadline, and never admits what a limit does not allow: while the store is away each limit's
declared mode decides, and `bound.overspend_bound` says how far that can go.

The holder makes lease ids, so that every call may be repeated. A repeated acquire of a live lease is answered with that
lease again; a refusal leaves nothing behind, so that its repeat is judged anew; after a settle or a release the id is
used up, even for an acquire that arrives after its own release.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from controlplane.admission import scripts, wire
from controlplane.admission.answers import (
    Acquired,
    Cold,
    ColdCounter,
    DoubtedCounter,
    Ended,
    Ending,
    Extended,
    Lease,
    OutsideWindows,
    Reasserted,
    Reserved,
    Settled,
    Standing,
    Unavailable,
)
from controlplane.admission.asking import Silence, Store
from controlplane.admission.charges import NOTHING, Charge, Use
from controlplane.admission.ending import Endings
from controlplane.admission.errands import Errands
from controlplane.admission.holding import Holdings
from controlplane.admission.local import LocalCounters
from controlplane.admission.taking import Takings
from controlplane.admission.tally import Tally
from controlplane.redis_pipe import ScriptPipe

DEADLINE_S = 0.05
TTL_S = 60.0
LONGEST_S = 3600.0
"""A lease is kept alive for so long: one that its holder forgot ends."""
MOST_SUMMED = 512
"""Live leases of one tenant that are summed when somebody asks what they hold."""


class Leases:
    """One process's leases. `store` must answer with bytes; a call waits `deadline_s` seconds at most, `Patience`'s.

    `run` keeps the leases of requests in flight alive. `close` after the last request.
    """

    def __init__(
        self,
        store: ScriptPipe | Redis,
        *,
        deadline_s: float = DEADLINE_S,
        ttl_s: float = TTL_S,
        longest_s: float = LONGEST_S,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        lua: Mapping[str, scripts.Script] | None = None,
    ) -> None:
        self.tally = Tally()
        self._deadline_s = deadline_s
        self._ttl_s = ttl_s
        self._store = Store(
            lua or scripts.register(store),
            deadline_s=deadline_s,
            monotonic=monotonic,
            tally=self.tally,
            on_heard=self._heard,
        )
        self._local = LocalCounters(monotonic, wall)
        self._errands = Errands()
        holder = secrets.token_hex(8)
        self._endings = Endings(self._store, holder=holder, wall=wall, tally=self.tally, errands=self._errands)
        self._holdings = Holdings(
            self._store,
            self._local,
            holder=holder,
            longest_s=longest_s,
            wall=wall,
            tally=self.tally,
            errands=self._errands,
        )
        self._takings = Takings(
            self._store, self._local, self._holdings, self._endings, holder=holder, wall=wall, tally=self.tally
        )

    @property
    def is_away(self) -> bool:
        """The store failed to answer and has not answered since."""
        return self._store.is_away

    @property
    def clock_offset_s(self) -> float:
        """How far this process's clock is ahead of the store's, as of the last lease taken."""
        return self._takings.clock_offset_s

    @property
    def in_flight(self) -> int:
        return len(self._holdings)

    @property
    def deferred(self) -> int:
        """Endings that wait for the store."""
        return self._endings.deferred

    @property
    def dropped(self) -> int:
        """Endings the store will never be told: too many waited."""
        return self._endings.dropped

    async def acquire(
        self, tenant_id: str, lease_id: str, charges: Sequence[Charge], *, ttl_s: float | None = None
    ) -> Acquired:
        """Take all `charges` or none. Cancelled or unanswered, it takes nothing for longer than the store is away."""
        if self._endings.before(lease_id) is not None:
            return Ended(why=Ending.SETTLED)
        return await self._takings.acquire(self._takings.wanted(tenant_id, lease_id, charges, ttl_s or self._ttl_s))

    def next_step(self) -> int:
        """Names one extension, for a caller that may repeat it."""
        return self._takings.next_step()

    async def extend(
        self, lease: Lease, charges: Sequence[Charge] = (), *, ttl_s: float | None = None, step: int | None = None
    ) -> Extended:
        """Take `charges` more for the lease, or nothing, and keep it for another `ttl_s`. One extension at a time.

        A repeat with the same `step` takes nothing again. Without charges only the time is extended. A refusal leaves
        the lease as it was.
        """
        return await self._takings.extend(lease, charges, ttl_s, self.next_step() if step is None else step)

    async def settle(self, lease: Lease, use: Use) -> Settled | Ended:
        """End the lease with what was used, exactly once. What is above the reservation is charged in full.

        It cannot be refused for lack of room, and a store that is away is told later. Ended says that another holder
        has the lease, or that the store has forgotten it: nothing is charged then.
        """
        if (before := self._endings.before(lease.lease_id)) is not None:
            return before
        lease = self._holdings.let_go(lease)
        self._local.settle(lease.lease_id, use)
        return await self._endings.end(lease, use)

    async def release(self, lease: Lease) -> Settled | Ended:
        """Settle what never ran."""
        return await self.settle(lease, NOTHING)

    async def reassert(self, leases: Sequence[Lease]) -> tuple[Reasserted, ...] | Unavailable:
        """Say that `leases` are still held: live ones are renewed, expired ones revived if nobody else took them, and
        ones that the store lost are made again with all they hold. Unavailable may leave some of them untold.
        """
        return await self._holdings.reassert(leases)

    async def hydrate(
        self, tenant_id: str, counter: ColdCounter, base: int, *, complete_until: float
    ) -> bool | Unavailable:
        """Give a cold counter what the ledger says was used in its window; False when somebody already has.

        `complete_until`, Unix seconds: the ledger had all usage that ended before. What the store missed and ended
        later is added when it is settled.
        """
        words = [counter.start, counter.stop, base, wire.micros(complete_until)]
        answer = await self._store.ask("hydrate", tenant_id, [counter.charge.key], words)
        return Unavailable() if isinstance(answer, Silence) else bool(answer[2])

    async def correct(self, tenant_id: str, counter: DoubtedCounter, used: int) -> bool | Unavailable:
        """Take what was reserved by leases long expired out of a counter, now that the ledger has all that was used in
        [`start`, `since`): `used`. False when somebody already has.
        """
        words = [counter.start, wire.micros(counter.since), used]
        answer = await self._store.ask("correct", tenant_id, [counter.charge.key], words)
        return Unavailable() if isinstance(answer, Silence) else bool(answer[2])

    async def standings(
        self, tenant_id: str, charges: Sequence[Charge], on_doubted: Callable[[DoubtedCounter], None] = lambda _: None
    ) -> tuple[Standing, ...] | Cold | OutsideWindows | Unavailable:
        """Where the limits of `charges` stand. Takes nothing; `on_doubted` is told of counters that are in doubt."""
        looked = [msgspec.structs.replace(charge, amount=1) for charge in charges]
        words = [[[counter, amount, -1, *window] for counter, amount, _, *window in wire.charge_words(looked)]]
        answer = await self._store.ask("peek", tenant_id, [charge.key for charge in charges], words)
        if isinstance(answer, Silence):
            return Unavailable()
        match answer:
            case ["standings", _, now, _, [_, *_] as cold]:
                outcome = wire.obstacle(tenant_id, charges, ["cold", 0, now, cold])
                assert isinstance(outcome, Cold)
                return outcome
            case ["standings", _, now, standings, _]:
                for one in wire.doubted(charges, standings, now):
                    on_doubted(one)
                return wire.standings(charges, standings)
            case _:
                return OutsideWindows(now=answer[1] / wire.SECOND_US)

    async def reserved(self, tenant_id: str) -> Reserved | Unavailable:
        """What the tenant's live leases hold, all gateways' together. Takes nothing."""
        answer = await self._store.ask("reserved", tenant_id, [], [MOST_SUMMED])
        return Unavailable() if isinstance(answer, Silence) else wire.reserved(answer)

    async def beat(self) -> None:
        """Renew all leases in flight, and tell the store what it was not told."""
        self._endings.flush()
        await self._holdings.beat()

    async def run(self) -> None:
        """Keep the leases in flight alive, until cancelled: three beats in a lease's time."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            await self.beat()

    async def close(self) -> None:
        """Tell the store the last endings if it answers, and stop."""
        self._endings.flush()
        await self._errands.close(10 * self._deadline_s)

    def _heard(self, tenant_id: str, answer: list[Any], was_away: bool) -> None:
        self._holdings.heard(tenant_id, answer, was_away)
        self._endings.flush()
