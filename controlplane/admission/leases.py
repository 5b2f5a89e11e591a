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
import enum
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisAwayError
from redis.exceptions import TimeoutError as RedisTimeoutError

from controlplane.admission import scripts, wire
from controlplane.admission.answers import (
    HELD_ON,
    Acquired,
    Basis,
    Cold,
    ColdCounter,
    DoubtedCounter,
    Ended,
    Ending,
    Extended,
    Granted,
    Holding,
    Lease,
    OutsideWindows,
    Reasserted,
    Refusal,
    Refused,
    Reserved,
    Settled,
    Standing,
    Unavailable,
    refused,
    soft_warnings,
    standing_of,
)
from controlplane.admission.charges import NOTHING, Charge, Use
from controlplane.admission.circuit import Circuit
from controlplane.admission.local import RETRY_S, LocalCounters, local_limit
from controlplane.admission.outbox import EndedLease, Outbox
from controlplane.admission.patience import Patience, slices_of
from controlplane.quotas.schemas import Away
from controlplane.redis_pipe import ScriptPipe

logger = logging.getLogger(__name__)

DEADLINE_S = 0.05
TTL_S = 60.0
LONGEST_S = 3600.0
"""A lease is kept alive for so long: one that its holder forgot ends."""
TOGETHER = 64
"""Leases said to be still held in one call."""
MOST_SUMMED = 512
"""Live leases of one tenant that are summed when somebody asks what they hold."""
MOST_TENANTS = 10_000
MOST_SETTLED = 10_000
"""Endings a process remembers, so that a repeat is harmless even when the store was lost in between."""

_AWAY = (
    RedisAwayError,
    RedisTimeoutError,
    ReadOnlyError,
    OutOfMemoryError,
    ClusterDownError,
    MasterDownError,
    TryAgainError,
    OSError,
)
_TAKES_NOTHING = ("NOREPLICAS", "MISCONF", "BUSY")
"""How a store refuses that takes no writes now: too few replicas, a disk that is full, a script that does not end."""


class _Silence(enum.Enum):
    """Why there is no answer."""

    NOT_ASKED = enum.auto()
    NOT_ANSWERED = enum.auto()


@dataclass(slots=True)
class Tally:
    """What happened since the process started, for its metrics."""

    granted: int = 0
    refused: int = 0
    cold: int = 0
    not_answered: int = 0
    """Calls the store did not answer by their deadline, or at all."""
    not_asked: int = 0
    """Calls not made because the store had just failed."""
    away_refused: int = 0
    away_local: int = 0
    away_open: int = 0
    """Requests decided without the store: refused, counted in this process, let pass uncounted."""
    settled: int = 0
    overrun_units: int = 0
    late: int = 0
    fenced: int = 0
    deferred: int = 0
    """Endings the store is told later."""
    reasserted: int = 0
    """Leases that were made again after the store was lost, or revived after they had expired."""


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
        self.clock_offset_s = 0.0
        """How far this process's clock is ahead of the store's, as of the last lease taken."""
        self._lua = lua or scripts.register(store)
        self._deadline_s = deadline_s
        self._slices = slices_of(deadline_s)
        self._ttl_s = ttl_s
        self._longest_s = longest_s
        self._wall = wall
        self._holder = secrets.token_hex(8)
        self._steps = itertools.count(1)
        self._circuit = Circuit(monotonic)
        self._local = LocalCounters(monotonic, wall)
        self._outbox = Outbox()
        self._held: dict[str, Lease] = {}
        self._settled: OrderedDict[str, Settled] = OrderedDict()
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._doubted: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def is_away(self) -> bool:
        """The store failed to answer and has not answered since."""
        return self._circuit.is_open

    @property
    def in_flight(self) -> int:
        return len(self._held)

    @property
    def deferred(self) -> int:
        """Endings that wait for the store."""
        return len(self._outbox)

    @property
    def dropped(self) -> int:
        """Endings the store will never be told: too many waited."""
        return self._outbox.dropped

    async def acquire(
        self, tenant_id: str, lease_id: str, charges: Sequence[Charge], *, ttl_s: float | None = None
    ) -> Acquired:
        """Take all `charges` or none. Cancelled or unanswered, it takes nothing for longer than the store is away."""
        if lease_id in self._settled:
            return Ended(why=Ending.SETTLED)
        wanted = self._wanted(tenant_id, lease_id, charges, ttl_s)
        words = [lease_id, self._holder, wire.micros(wanted.ttl_s), wire.charge_words(charges)]
        try:
            answer = await self._ask("acquire", tenant_id, charges, words)
        except BaseException:
            self._tell(wanted, NOTHING)
            raise
        if isinstance(answer, _Silence):
            return self._acquire_away(wanted, answer)
        outcome = self._taken(wanted, charges, answer)
        if isinstance(outcome, Granted):
            if outcome.repeated and lease_id in self._held:
                return msgspec.structs.replace(outcome, lease=self._held[lease_id])
            if not outcome.repeated:
                self.clock_offset_s = self._wall() - outcome.lease.taken_at
            self._held[lease_id] = outcome.lease
        return outcome

    def next_step(self) -> int:
        """Names one extension, for a caller that may repeat it."""
        return next(self._steps)

    async def extend(
        self, lease: Lease, charges: Sequence[Charge] = (), *, ttl_s: float | None = None, step: int | None = None
    ) -> Extended:
        """Take `charges` more for the lease, or nothing, and keep it for another `ttl_s`. One extension at a time.

        A repeat with the same `step` takes nothing again. Without charges only the time is extended. A refusal leaves
        the lease as it was.
        """
        number = self.next_step() if step is None else step
        lease = self._held.get(lease.lease_id, lease)
        if lease.basis is Basis.STORE:
            outcome = await self._extend(lease, charges, ttl_s, number)
            if outcome != Ended(why=Ending.LOST):
                return outcome
        brought = await self._bring(lease)
        if isinstance(brought, Ended):
            return brought
        return await self._extend(brought, charges, ttl_s, number)

    async def settle(self, lease: Lease, use: Use) -> Settled | Ended:
        """End the lease with what was used, exactly once. What is above the reservation is charged in full.

        It cannot be refused for lack of room, and a store that is away is told later. Ended says that another holder
        has the lease, or that the store has forgotten it: nothing is charged then.
        """
        if (before := self._settled.get(lease.lease_id)) is not None:
            return before
        lease = self._held.pop(lease.lease_id, lease)
        self._local.settle(lease.lease_id, use)
        ended = EndedLease(lease=lease, use=use, ended_at=self._wall())
        try:
            outcome = await self._send(ended)
        except BaseException:
            self._put(ended)
            raise
        if outcome is None:
            self.tally.deferred += 1
            self._outbox.put(ended)
            return Settled(deferred=True)
        return outcome

    async def release(self, lease: Lease) -> Settled | Ended:
        """Settle what never ran."""
        return await self.settle(lease, NOTHING)

    async def reassert(self, leases: Sequence[Lease]) -> tuple[Reasserted, ...] | Unavailable:
        """Say that `leases` are still held: live ones are renewed, expired ones revived if nobody else took them, and
        ones that the store lost are made again with all they hold. Unavailable may leave some of them untold.
        """
        by_id: dict[str, Reasserted] = {}
        by_tenant: dict[str, list[Lease]] = {}
        for lease in leases:
            by_tenant.setdefault(lease.tenant_id, []).append(self._held.get(lease.lease_id, lease))
        for tenant_id, owned in by_tenant.items():
            for start in range(0, len(owned), TOGETHER):
                told = await self._reassert(tenant_id, owned[start : start + TOGETHER])
                if told is None:
                    return Unavailable()
                by_id.update((one.lease.lease_id, one) for one in told)
        return tuple(by_id[lease.lease_id] for lease in leases)

    async def hydrate(
        self, tenant_id: str, counter: ColdCounter, base: int, *, complete_until: float
    ) -> bool | Unavailable:
        """Give a cold counter what the ledger says was used in its window; False when somebody already has.

        `complete_until`, Unix seconds: the ledger had all usage that ended before. What the store missed and ended
        later is added when it is settled.
        """
        words = [counter.start, counter.stop, base, wire.micros(complete_until)]
        answer = await self._ask("hydrate", tenant_id, [counter.charge], words)
        return Unavailable() if isinstance(answer, _Silence) else bool(answer[2])

    async def correct(self, tenant_id: str, counter: DoubtedCounter, used: int) -> bool | Unavailable:
        """Take what was reserved by leases long expired out of a counter, now that the ledger has all that was used in
        [`start`, `since`): `used`. False when somebody already has.
        """
        words = [counter.start, wire.micros(counter.since), used]
        answer = await self._ask("correct", tenant_id, [counter.charge], words)
        return Unavailable() if isinstance(answer, _Silence) else bool(answer[2])

    async def standings(
        self, tenant_id: str, charges: Sequence[Charge], on_doubted: Callable[[DoubtedCounter], None] = lambda _: None
    ) -> tuple[Standing, ...] | Cold | OutsideWindows | Unavailable:
        """Where the limits of `charges` stand. Takes nothing; `on_doubted` is told of counters that are in doubt."""
        looked = [msgspec.structs.replace(charge, amount=1) for charge in charges]
        words = [[[counter, amount, -1, *window] for counter, amount, _, *window in wire.charge_words(looked)]]
        answer = await self._ask("peek", tenant_id, charges, words)
        if isinstance(answer, _Silence):
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
        answer = await self._ask_keys("reserved", tenant_id, [], [MOST_SUMMED])
        return Unavailable() if isinstance(answer, _Silence) else wire.reserved(answer)

    async def beat(self) -> None:
        """Renew all leases in flight, and tell the store what it was not told."""
        self._flush()
        self._doubted.update(lease.tenant_id for lease in self._held.values())
        await self._resolve_doubts()

    async def run(self) -> None:
        """Keep the leases in flight alive, until cancelled: three beats in a lease's time."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            await self.beat()

    async def close(self) -> None:
        """Tell the store the last endings if it answers, and stop."""
        self._flush()
        for task in list(self._tasks.values()):
            await asyncio.wait({task}, timeout=10 * self._deadline_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # The store ------------------------------------------------------------------------------------------------------

    async def _ask(
        self, name: str, tenant_id: str, charges: Iterable[Charge], words: list[Any]
    ) -> list[Any] | _Silence:
        return await self._ask_keys(name, tenant_id, [charge.key for charge in charges], words)

    async def _ask_keys(
        self, name: str, tenant_id: str, counters: Sequence[str], words: list[Any]
    ) -> list[Any] | _Silence:
        if not self._circuit.allow():
            self.tally.not_asked += 1
            return _Silence.NOT_ASKED
        try:
            async with Patience(self._slices):
                packed = await self._lua[name](keys=wire.keys(tenant_id, counters), args=[wire.encode(words)])
            answer = wire.decode(packed)
        except _AWAY:
            return self._unanswered()
        except ResponseError as error:
            if str(error).startswith(_TAKES_NOTHING):
                return self._unanswered()
            self._circuit.abandoned()
            raise
        except msgspec.DecodeError as error:
            self._circuit.abandoned()
            raise ResponseError("the store's answer cannot be read") from error
        except BaseException:
            self._circuit.abandoned()
            raise
        self._heard(tenant_id, answer)
        return answer

    def _unanswered(self) -> _Silence:
        self.tally.not_answered += 1
        self._circuit.failed()
        return _Silence.NOT_ANSWERED

    def _heard(self, tenant_id: str, answer: list[Any]) -> None:
        """The store answered: it is back, or it is another one than before, and what it does not know it is told."""
        if self._circuit.succeeded():
            self._doubted.update(lease.tenant_id for lease in self._held.values())
        if answer[0] not in {"outside", "ended"}:
            known, epoch = self._epochs.get(tenant_id), answer[1]
            self._epochs[tenant_id] = epoch
            self._epochs.move_to_end(tenant_id)
            if len(self._epochs) > MOST_TENANTS:
                self._epochs.popitem(last=False)
            if known is not None and known != epoch:
                self._doubted.add(tenant_id)
        if self._doubted:
            self._start("doubts", self._resolve_doubts)
        self._flush()

    def _start(self, name: str, work: Callable[[], Any]) -> None:
        if name not in self._tasks:
            task = asyncio.create_task(work(), name=f"leases-{name}")
            self._tasks[name] = task
            task.add_done_callback(lambda _: self._tasks.pop(name, None))

    # Taking ---------------------------------------------------------------------------------------------------------

    def _wanted(self, tenant_id: str, lease_id: str, charges: Sequence[Charge], ttl_s: float | None) -> Lease:
        now, ttl_s = self._wall(), ttl_s or self._ttl_s
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

    def _taken(self, lease: Lease, asked: Sequence[Charge], answer: list[Any]) -> Extended:
        if answer[0] == "granted":
            self.tally.granted += 1
            return wire.granted(lease, asked, answer)
        outcome = wire.obstacle(lease.tenant_id, asked, answer)
        if isinstance(outcome, Refused):
            self.tally.refused += 1
        elif isinstance(outcome, Cold):
            self.tally.cold += 1
        elif isinstance(outcome, Ended) and outcome.why is Ending.FENCED:
            self.tally.fenced += 1
        return outcome

    def _acquire_away(self, wanted: Lease, silence: _Silence) -> Granted | Refused:
        outcome = self._without_store(wanted, wanted.charges)
        if isinstance(outcome, Granted):
            self._held[wanted.lease_id] = outcome.lease
        elif silence is _Silence.NOT_ANSWERED:
            self._tell(wanted, NOTHING)
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
        answer = await self._ask("extend", lease.tenant_id, asked, words)
        if isinstance(answer, _Silence):
            return self._extend_away(longer, more)
        outcome = self._taken(longer, asked, answer)
        if isinstance(outcome, Granted) and lease.lease_id in self._held:
            self._held[lease.lease_id] = outcome.lease
        return outcome

    def _extend_away(self, longer: Lease, charges: Sequence[Charge]) -> Granted | Refused:
        outcome = self._without_store(longer, charges)
        if isinstance(outcome, Granted) and longer.lease_id in self._held:
            self._held[longer.lease_id] = longer
        return outcome

    def _without_store(self, lease: Lease, charges: Sequence[Charge]) -> Granted | Refused:
        """What the limits that have something to say declare for this."""
        binding = [charge for charge in charges if charge.hard is not None and charge.amount > 0]
        closed = [_closed(charge) for charge in binding if charge.away is Away.CLOSED]
        counted = [charge for charge in binding if charge.away is Away.LOCAL]
        refusals = closed or self._local.take(lease.lease_id, counted, lease.ttl_s)
        standings = tuple(self._local_standing(charge) for charge in counted)
        if refusals:
            self.tally.away_refused += 1
            return refused(refusals, standings)
        uncounted = tuple(charge.quota_id for charge in binding if charge.away is Away.OPEN)
        if uncounted:
            self.tally.away_open += 1
        if counted:
            self.tally.away_local += 1
        used = [self._local.used(charge) for charge in counted]
        return Granted(lease=lease, standings=standings, warnings=soft_warnings(counted, used), uncounted=uncounted)

    def _local_standing(self, charge: Charge) -> Standing:
        return standing_of(
            msgspec.structs.replace(charge, hard=local_limit(charge)), self._local.used(charge), reset_s=RETRY_S
        )

    async def _bring(self, lease: Lease) -> Lease | Ended:
        """A lease this process counted alone, as the store has it if the store answers."""
        told = await self._reassert(lease.tenant_id, [lease])
        if told is None:
            return lease
        return told[0].lease if told[0].state in HELD_ON else Ended(why=Ending(told[0].state.value))

    # Ending ---------------------------------------------------------------------------------------------------------

    async def _send(self, ended: EndedLease) -> Settled | Ended | None:
        lease = ended.lease
        known = [lease.fence, lease.epoch, wire.micros(lease.expires_at), wire.micros(ended.ended_at)]
        words = [lease.lease_id, self._holder, *known, wire.use_words(lease, ended.use)]
        answer = await self._ask("settle", lease.tenant_id, lease.charges, words)
        if isinstance(answer, _Silence):
            return None
        outcome = wire.settled(lease, answer)
        if isinstance(outcome, Settled):
            self._settled[lease.lease_id] = msgspec.structs.replace(outcome, repeated=True)
            if len(self._settled) > MOST_SETTLED:
                self._settled.popitem(last=False)
            self.tally.settled += 1
            self.tally.late += outcome.late
            self.tally.overrun_units += sum(one.units for one in outcome.overruns)
        elif outcome.why is Ending.FENCED:
            self.tally.fenced += 1
        return outcome

    def _tell(self, lease: Lease, use: Use) -> None:
        self._put(EndedLease(lease=lease, use=use, ended_at=self._wall()))

    def _put(self, ended: EndedLease) -> None:
        self.tally.deferred += 1
        self._outbox.put(ended)
        self._flush()

    def _flush(self) -> None:
        if self._outbox:
            self._start("outbox", self._empty_outbox)

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

    # Holding on -----------------------------------------------------------------------------------------------------

    async def _reassert(self, tenant_id: str, leases: Sequence[Lease]) -> list[Reasserted] | None:
        counters = list(dict.fromkeys(charge.key for lease in leases for charge in lease.charges))
        places = {key: place for place, key in enumerate(counters, wire.FIRST_COUNTER)}
        words = [self._holder, [wire.held_words(lease, places) for lease in leases]]
        answer = await self._ask_keys("reassert", tenant_id, counters, words)
        if isinstance(answer, _Silence):
            return None
        told = [wire.reasserted(lease, answer[1], one) for lease, one in zip(leases, answer[3], strict=True)]
        for one in told:
            self._learned(one)
        return told

    def _learned(self, told: Reasserted) -> None:
        lease_id = told.lease.lease_id
        self.tally.reasserted += told.state in {Holding.REVIVED, Holding.RECREATED}
        if lease_id in self._held:
            if told.state in HELD_ON:
                self._held[lease_id] = told.lease
            else:
                del self._held[lease_id]

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
