"""The queue that all gateways of a pool share: whose turn it is, and what of the pool is taken.

Layer: scheduling. Pure. One `turn` takes a gateway's news (arrivals, service to charge, ends) and dispatches what the
pool has room for. `lua_dispatch/turn.lua` does the same, step by step, inside Redis; this object serves simulations,
the time while Redis is away, and as the script's proof. It must never look at a clock.

Order, in each lane: the first band that waits, unless a later one is owed its floor; in the band the tenant with the
least virtual service (Sheng et al., Fairness in Serving Large Language Models, algorithm 2: the tenant that comes back
is lifted, input is charged at dispatch, output as it is produced, each divided by the tenant's weight), and of the
tenant the earliest deadline. Dispatch stops at the first that has no room: what comes after it must not overtake it.

Bounds. A request holds KV tokens for its prompt and its longest answer from dispatch until its end was told, so what is
charged to a tenant after its last dispatch is what its dispatched requests still generate: M tokens at most. With
U = max(input charge · longest prompt, output charge · M) / weight, two tenants that wait in one line throughout differ
by 2·U at most in what was charged to them (theorem 4.4), for any number of gateways. What a gateway did not tell yet is
missing from the counters, and never from what is held: with S the output charges that all gateways together keep back
(what the pool generates between two of their turns, and output charge · M at the very most), the service that tenants
received differs by 2·(U + S / weight) at most. A band that waits gets its floor of the tokens that are dispatched to
other bands of its lane, less two of the lane's largest requests.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from controlplane.admission.bands import LINES, Band, Lane, lane_of_line
from controlplane.admission.turn_messages import Arrival, Grant, Rules, Service, Turn, TurnAnswer

DEAD_S = 10.0
"""A gateway that took no turn for so long is gone: its requests leave the queue and what they held is free."""
IDLE_S = 600.0
"""How long a tenant that neither waits nor runs is remembered at least."""
MAX_REQUESTS = 65_536
"""Requests of one pool in the queue and running; more are refused."""
MAX_GRANTS = 64
"""Dispatches of one turn."""
REAPED = 64
"""Requests of dead gateways that one turn clears, and idle tenants that it forgets."""


class _Entry:
    __slots__ = ("arrival", "gateway", "held", "tag")

    def __init__(self, arrival: Arrival, gateway: str) -> None:
        self.arrival = arrival
        self.gateway = gateway
        self.held = False
        self.tag = 0.0


Member = tuple[int, str]
"""A tenant in a line."""


class SharedQueue:
    """One pool's queue. Every call is bounded by its message, MAX_GRANTS and REAPED."""

    def __init__(self) -> None:
        self._sequence = 0
        self._requests: dict[str, _Entry] = {}
        self._heard: dict[str, float] = {}
        self._numbers: dict[str, int] = {}
        self._owned: dict[str, set[str]] = {}
        self._unseen: dict[str, set[str]] = {}
        self._served: dict[Member, float] = {}
        self._queues: dict[Member, list[tuple[int, str]]] = {}
        self._backlog: list[dict[str, float]] = [{} for _ in range(LINES)]
        self._held: dict[Member, int] = {}
        self._idle: dict[Member, float] = {}
        self._last = [""] * LINES  # the tenant that left each backlog last; it is not forgotten
        self._owed = [0.0] * LINES
        self._slots = [0, 0]
        self._tokens = [0, 0]

    @property
    def waiting(self) -> int:
        """Requests that were not dispatched yet."""
        return len(self._requests) - sum(self._slots)

    def served(self, line: int, tenant: str) -> float:
        """A tenant's virtual service, 0 if it is not known."""
        return self._served.get((line, tenant), 0.0)

    def counters(self) -> dict[Member, float]:
        """Everybody's virtual service."""
        return dict(self._served)

    def turn(self, message: Turn, now: float) -> TurnAnswer:
        """Take `message` in and dispatch. `now` is in Unix seconds."""
        gateway = message.gateway
        heard = self._heard.get(gateway)
        if not message.fresh and (heard is None or heard < now - DEAD_S):
            return TurnAnswer(self._sequence, now, True)
        self._sequence += 1
        self._heard[gateway] = now
        reaping = self._reap(now)
        if message.number > self._numbers.get(gateway, 0):
            self._numbers[gateway] = message.number
            for service in message.served:
                self._charge(service, now)
        for request_id in message.ended:
            entry = self._requests.get(request_id)
            if entry is not None and entry.gateway == gateway:
                self._end(request_id, entry, now)
        refused = tuple(each.request_id for each in message.arrivals if not self._arrive(each, gateway, now))
        for request_id in message.seen:
            self._unseen.get(gateway, set()).discard(request_id)
        poked = self._dispatch(message.rules)
        self._forget(now)
        return TurnAnswer(
            self._sequence,
            now,
            False,
            self._unheard(gateway),
            refused,
            tuple(sorted(poked - {gateway})),
            self.waiting,
            sum(self._slots),
            sum(self._tokens),
            len(self._heard),
            self._slots[Lane.LONG],
            reaping,
        )

    def _unheard(self, gateway: str) -> tuple[Grant, ...]:
        unseen = sorted(self._unseen.get(gateway, ()))[:MAX_GRANTS]
        return tuple(Grant(request_id, self._requests[request_id].tag) for request_id in unseen)

    def _reap(self, now: float) -> bool:
        """Whether there is more to clear than one turn may."""
        left = REAPED
        dead = [name for name, heard in self._heard.items() if heard < now - DEAD_S]
        for gateway in sorted(dead, key=lambda name: (self._heard[name], name))[:REAPED]:
            if not left:
                break
            owned = sorted(self._owned.get(gateway, ()))
            for request_id in owned[:left]:
                self._end(request_id, self._requests[request_id], now)
            left -= min(left, len(owned))
            if not self._owned.get(gateway):
                del self._heard[gateway]
                self._numbers.pop(gateway, None)
        return any(gateway in self._heard for gateway in dead)

    def _charge(self, service: Service, now: float) -> None:
        member = (service.line, service.tenant)
        if member not in self._served:
            self._served[member] = self._floor(service.line)
            self._rest(member, now)
        if not self._backlog[service.line]:  # what is served while nobody waits earns the others no credit
            self._served[member] = max(self._served[member], self._floor(service.line))
            self._last[service.line] = service.tenant
        self._add(member, service.charge)

    def _add(self, member: Member, charge: float) -> None:
        line, tenant = member
        self._served[member] += charge
        if tenant in self._backlog[line]:
            self._backlog[line][tenant] = self._served[member]

    def _floor(self, line: int) -> float:
        """Where a tenant that comes back starts at least."""
        if self._backlog[line]:
            return min(self._backlog[line].values())
        return self._served.get((line, self._last[line]), 0.0)

    def _arrive(self, arrival: Arrival, gateway: str, now: float) -> bool:
        known = self._requests.get(arrival.request_id)
        if known is not None:
            if known.gateway == gateway:
                return True
            self._end(arrival.request_id, known, now)  # its gateway tells it anew under a new name
        if len(self._requests) >= MAX_REQUESTS:
            return False
        entry = self._requests[arrival.request_id] = _Entry(arrival, gateway)
        self._owned.setdefault(gateway, set()).add(arrival.request_id)
        member = (arrival.line, arrival.tenant)
        self._idle.pop(member, None)
        if member not in self._served:
            self._served[member] = self._floor(arrival.line)
        if arrival.held:
            self._hold(entry)
            return True
        if member not in self._queues:
            self._served[member] = max(self._served[member], self._floor(arrival.line))
            self._backlog[arrival.line][arrival.tenant] = self._served[member]
            self._queues[member] = []
        bisect.insort(self._queues[member], (arrival.deadline_ms, arrival.request_id))
        return True

    def _hold(self, entry: _Entry) -> None:
        arrival = entry.arrival
        lane, member = lane_of_line(arrival.line), (arrival.line, arrival.tenant)
        entry.held = True
        self._slots[lane] += 1
        self._tokens[lane] += arrival.tokens
        self._held[member] = self._held.get(member, 0) + 1

    def _dequeue(self, arrival: Arrival) -> None:
        """Take a waiting request out; a tenant with none left leaves the backlog."""
        line, tenant = member = (arrival.line, arrival.tenant)
        queue = self._queues[member]
        del queue[bisect.bisect_left(queue, (arrival.deadline_ms, arrival.request_id))]
        if not queue:
            del self._queues[member]
            self._last[line] = tenant
            del self._backlog[line][tenant]
            if not self._backlog[line]:
                self._owed[line] = 0.0

    def _end(self, request_id: str, entry: _Entry, now: float) -> None:
        arrival = entry.arrival
        member = (arrival.line, arrival.tenant)
        if entry.held:
            lane = lane_of_line(arrival.line)
            self._slots[lane] -= 1
            self._tokens[lane] -= arrival.tokens
            self._held[member] -= 1
            if not self._held[member]:
                del self._held[member]
        else:
            self._dequeue(arrival)
        _discard(self._owned, entry.gateway, request_id)
        _discard(self._unseen, entry.gateway, request_id)
        del self._requests[request_id]
        self._rest(member, now)

    def _rest(self, member: Member, now: float) -> None:
        if member not in self._queues and member not in self._held:
            self._idle[member] = now

    def _forget(self, now: float) -> None:
        """Drop who was idle for long and could come back with nothing but the floor; look again at the others later."""
        if not self._idle:
            return
        oldest = sorted((since, f"{line}{tenant}", (line, tenant)) for (line, tenant), since in self._idle.items())
        for since, _, member in oldest[:REAPED]:
            if since > now - IDLE_S:
                break
            line, tenant = member
            if self._served[member] <= self._floor(line) and self._last[line] != tenant:
                del self._idle[member]
                del self._served[member]
            else:
                self._idle[member] = now

    def _dispatch(self, rules: Rules) -> set[str]:
        """Grant while there is room; the gateways that got a grant."""
        owners: set[str] = set()
        left = MAX_GRANTS
        for lane in Lane:
            while left and (line := self._next_line(lane, rules.floors)) is not None:
                entry = self._head(line)
                if not self._fits(lane, entry.arrival.tokens, rules):
                    break
                self._grant(entry, rules.floors)
                owners.add(entry.gateway)
                left -= 1
        return owners

    def _head(self, line: int) -> _Entry:
        backlog = self._backlog[line]
        tenant = min(backlog, key=lambda name: (backlog[name], name))
        return self._requests[self._queues[line, tenant][0][1]]

    def _next_line(self, lane: Lane, floors: tuple[float, ...]) -> int | None:
        """The first line that waits, or a later one that is owed its head."""
        first: int | None = None
        for line in _lines(lane):
            if not self._backlog[line]:
                continue
            if first is None:
                first = line
            elif floors[line % len(Band)] > 0 and self._owed[line] >= self._head(line).arrival.tokens:
                return line
        return first

    def _fits(self, lane: Lane, tokens: int, rules: Rules) -> bool:
        if not rules.slots:
            return False
        if not self._slots[lane]:
            return True
        if lane is Lane.LONG and (
            self._slots[lane] >= rules.long_slots or self._tokens[lane] + tokens > rules.long_tokens
        ):
            return False
        kept = 0
        if lane is Lane.SHORT and any(self._backlog[line] for line in _lines(Lane.LONG)):
            kept = max(0, rules.long_reserve - self._tokens[Lane.LONG])
        return sum(self._slots) < rules.slots and sum(self._tokens) + tokens + kept <= rules.tokens

    def _grant(self, entry: _Entry, floors: tuple[float, ...]) -> None:
        arrival = entry.arrival
        member = (arrival.line, arrival.tenant)
        waiting = [line for line in _lines(lane_of_line(arrival.line)) if self._backlog[line]]
        for line in waiting[1:]:
            if line != arrival.line:
                self._owed[line] += floors[line % len(Band)] * arrival.tokens
        self._owed[arrival.line] = max(0.0, self._owed[arrival.line] - arrival.tokens)
        entry.tag = self._served[member]
        self._dequeue(arrival)
        self._hold(entry)
        self._add(member, arrival.charge)
        self._unseen.setdefault(entry.gateway, set()).add(arrival.request_id)


def _lines(lane: Lane) -> Iterable[int]:
    return range(lane * len(Band), (lane + 1) * len(Band))


def _discard(sets: dict[str, set[str]], name: str, item: str) -> None:
    """Take `item` out; a set that is left empty goes too."""
    if name in sets:
        sets[name].discard(item)
        if not sets[name]:
            del sets[name]
