"""Fair dispatch, as one gateway takes part in it: what the pool has room for, and what to tell the shared queue.

Layer: scheduling. Pure: it makes messages and takes answers; whoever owns it sends them, to Redis or to a queue of its
own. Works for any backend: all it needs of a replica is how many requests it runs at once and how much KV it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from controlplane.admission.bands import FLOORS, LONG_SHARE, Band, Lane, line_of
from controlplane.admission.queue import MAX_GRANTS
from controlplane.admission.turn_messages import Arrival, Grant, Rules, Service, Turn, TurnAnswer
from dataplane.protocol import CoreReady, Gauges
from dataplane.scheduling.vtc import TokenCharges

SPARE_SHARE = 0.125
"""Requests above those it runs that a replica may hold, so that a free place is taken at once."""
MOST_NEWS = 1024
"""Arrivals, charges and ends in one message each; the rest goes with the next."""


class Credit(msgspec.Struct, frozen=True):
    """What one replica can hold: requests, KV tokens, and the longest request it takes."""

    slots: int
    tokens: int
    longest: int


def credit_of(ready: CoreReady | None, gauges: Gauges) -> Credit | None:
    """A replica's credit from its report; None when it does not tell.

    `gauges.credits` is the replica's own word; without it, it is what it runs at once and a little more.
    """
    if ready is None or ready.max_model_len <= 0:
        return None
    slots = gauges.credits or ready.max_num_seqs + max(1, int(ready.max_num_seqs * SPARE_SHARE))
    tokens = ready.total_blocks * ready.block_size
    return Credit(slots, tokens or slots * ready.max_model_len, ready.max_model_len) if slots > 0 else None


def rules_of(credits: Iterable[Credit], floors: tuple[float, ...] = FLOORS) -> Rules:
    """What the replicas hold together. The long lane may hold LONG_SHARE of it, but always one request a turn.

    Raises ValueError for floors that leave nothing to the bands before.
    """
    if len(floors) != len(Band) or min(floors) < 0 or sum(floors) >= 1:
        raise ValueError(f"the bands' floors must be {len(Band)} shares of less than 1 together, got {floors}")
    known = list(credits)
    slots = sum(credit.slots for credit in known)
    tokens = sum(credit.tokens for credit in known)
    longest = max((credit.longest for credit in known), default=0)
    return Rules(
        slots=slots,
        tokens=tokens,
        long_slots=max(1, int(len(known) * LONG_SHARE)),
        long_tokens=max(longest, int(tokens * LONG_SHARE)),
        long_reserve=min(longest, tokens),
        floors=floors,
    )


def part_of(rules: Rules, gateways: int) -> Rules:
    """One gateway's part while it cannot ask: the parts of all gateways add up to no more than `rules`, except that
    each may hold one request.
    """
    return msgspec.structs.replace(
        rules,
        slots=max(min(rules.slots, 1), rules.slots // gateways),
        tokens=rules.tokens // gateways,
        long_slots=max(1, rules.long_slots // gateways),
        long_tokens=rules.long_tokens // gateways,
        long_reserve=rules.long_reserve // gateways,
    )


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was admitted. `deadline_at` is in Unix seconds; tokens as estimated at admission, `output` the
    longest answer.
    """

    request_id: str
    tenant: str
    lane: Lane
    band: Band
    deadline_at: float
    uncached: int
    cached: int
    output: int

    @property
    def line(self) -> int:
        return line_of(self.lane, self.band)

    @property
    def tokens(self) -> int:
        """KV tokens it holds at most, as estimated."""
        return self.uncached + self.cached + self.output


class Dispatched(NamedTuple):
    """What became of requests, each named once: those that may go, and those that found the queue full."""

    grants: list[Grant]
    refused: list[str]


class Dispatcher:
    """One boot of a gateway in one pool's shared queue. `weights` are those of the share plan, 1 where not named.

    `add`, `produced` and `end` take note; `message` is what to send next, the same again until `answered`. A tenant's
    weight holds for a request from its arrival to its end. Each time that everything is told anew, it is under a new
    name, so that the queue can clear what it knows under the old one.
    """

    def __init__(self, gateway: str, charges: TokenCharges, weights: Mapping[str, float] | None = None) -> None:
        self._name = gateway
        self._incarnation = 1
        self.charges = charges
        self.weights: Mapping[str, float] = weights or {}
        self._known: dict[str, tuple[Waiting, float]] = {}
        self._running: set[str] = set()
        self._new: dict[str, None] = {}
        self._unsent: dict[tuple[int, str], float] = {}
        self._ended: dict[str, None] = {}
        self._seen: set[str] = set()
        self._number = 0
        self._fresh = True
        self._message: Turn | None = None
        self._taken: dict[tuple[int, str], float] = {}

    def __len__(self) -> int:
        """Requests that wait or run."""
        return len(self._known)

    @property
    def gateway(self) -> str:
        return f"{self._name}#{self._incarnation}"

    @property
    def news(self) -> bool:
        """Whether there is anything to tell."""
        crowded = len(self._seen) >= MAX_GRANTS // 2  # what was seen makes room for more, else it can wait
        return bool(self._message or self._new or self._unsent or self._ended or crowded)

    @property
    def unsent(self) -> float:
        """The output charges that were kept back so far, over all tenants: this gateway's part of S."""
        return sum(self._unsent.values()) + sum(self._taken.values())

    def waiting(self) -> list[Waiting]:
        """Requests that were not dispatched."""
        return [request for request_id, (request, _) in self._known.items() if request_id not in self._running]

    def add(self, request: Waiting) -> None:
        """A request was admitted and waits."""
        assert request.request_id not in self._known, "a request was added twice"
        self._known[request.request_id] = (request, self.weights.get(request.tenant, 1.0))
        self._new[request.request_id] = None

    def begin(self, request: Waiting) -> None:
        """A request was dispatched without asking, where nobody waits. Its input is charged with the next message."""
        self.add(request)
        self._running.add(request.request_id)
        self._charge(request.request_id, self.charges.of(request.uncached, request.cached, 0))

    def produced(self, request_id: str, tokens: int) -> None:
        """A dispatched request generated `tokens`."""
        self._charge(request_id, self.charges.of(0, 0, tokens))

    def counted(self, request_id: str, uncached: int, cached: int) -> None:
        """The engine has counted a dispatched request's input: what was charged by the estimate is put right."""
        request, _ = self._known[request_id]
        self._charge(
            request_id, self.charges.of(uncached, cached, 0) - self.charges.of(request.uncached, request.cached, 0)
        )

    def _charge(self, request_id: str, charge: float) -> None:
        request, weight = self._known[request_id]
        member = (request.line, request.tenant)
        self._unsent[member] = self._unsent.get(member, 0.0) + charge / weight

    def untold(self, request_id: str) -> bool:
        """Whether the queue has certainly not heard of a request."""
        sent = self._message.arrivals if self._message is not None else ()
        return request_id in self._new and all(arrival.request_id != request_id for arrival in sent)

    def tokens_of(self, request_id: str) -> int:
        """The KV tokens that a request holds from dispatch to end, 0 when it is not known."""
        known = self._known.get(request_id)
        return 0 if known is None else known[0].tokens

    def end(self, request_id: str) -> None:
        """A request is over, dispatched or not; what it holds is free once that was told. One that was refused is not
        known any more, and nothing happens.
        """
        untold = self.untold(request_id)
        if self._known.pop(request_id, None) is None:
            return
        self._running.discard(request_id)
        self._seen.discard(request_id)
        if not untold:
            self._ended[request_id] = None
        self._new.pop(request_id, None)

    def message(self, rules: Rules) -> Turn:
        """What to send: the same as before while that was not answered."""
        if self._message is None:
            self._number += 1
            self._taken = dict(list(self._unsent.items())[:MOST_NEWS])
            for member in self._taken:
                del self._unsent[member]
            self._message = Turn(
                self.gateway,
                self._number,
                self._fresh,
                rules,
                tuple(self._arrival(request_id) for request_id in list(self._new)[:MOST_NEWS]),
                tuple(Service(line, tenant, charge) for (line, tenant), charge in self._taken.items()),
                () if self._unsent else tuple(list(self._ended)[:MOST_NEWS]),  # never freed before it was charged
                tuple(sorted(self._seen)[:MAX_GRANTS]),
            )
        return self._message

    def _arrival(self, request_id: str) -> Arrival:
        request, weight = self._known[request_id]
        return Arrival(
            request_id,
            request.line,
            request.tenant,
            int(request.deadline_at * 1000),
            request.tokens,
            self.charges.of(request.uncached, request.cached, 0) / weight,
            request_id in self._running,
        )

    def answered(self, answer: TurnAnswer) -> Dispatched:
        """Take the answer to `message`. When the queue did not know this gateway, the next one tells all again."""
        message, self._message = self._message, None
        assert message is not None, "an answer came without a message"
        if answer.lost:
            self._retell()
            return Dispatched([], [])
        self._fresh = False
        self._taken = {}
        for arrival in message.arrivals:
            self._new.pop(arrival.request_id, None)
        for request_id in message.ended:
            del self._ended[request_id]
        self._seen.difference_update(message.seen)
        # One that went without asking runs on: the queue takes no note of it, and its end is told all the same.
        refused = [each for each in answer.refused if each in self._known and each not in self._running]
        for request_id in refused:
            del self._known[request_id]
        grants = []
        for grant in answer.grants:
            if grant.request_id not in self._known:
                continue  # it gave up meanwhile, which the next message tells
            self._seen.add(grant.request_id)
            if grant.request_id not in self._running:
                self._running.add(grant.request_id)
                grants.append(grant)
        return Dispatched(grants, refused)

    def move(self) -> None:
        """Take part in another queue from now on, which is to be told everything."""
        self._message = None
        self._retell()

    def _retell(self) -> None:
        self._incarnation += 1
        self._fresh = True
        self._new = dict.fromkeys(self._known)
        self._ended.clear()
        self._seen.clear()
        for member, charge in self._taken.items():
            self._unsent[member] = self._unsent.get(member, 0.0) + charge
        self._taken = {}
