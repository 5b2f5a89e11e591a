"""Random news of several gateways, for one pool's shared queue."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from controlplane.admission.bands import LINES
from controlplane.admission.turn_messages import Arrival, Rules, Service, Turn, TurnAnswer

RULES = Rules(slots=12, tokens=4_000, long_slots=2, long_tokens=1_600, long_reserve=800)
TENANTS = ("a", "b", "ä", "d:1", "e")


@dataclass
class Chatter:
    """One gateway that says anything a gateway may say, and repeats itself now and then."""

    name: str
    rng: random.Random
    rules: Rules = RULES
    number: int = 0
    fresh: bool = True
    known: dict[str, Arrival] = field(default_factory=dict)
    granted: set[str] = field(default_factory=set)
    count: int = 0
    last: Turn | None = None

    def message(self) -> Turn:
        rng = self.rng
        if self.last is not None and rng.random() < 0.1:
            return self.last
        self.number += 1
        arrivals = tuple(self._arrival() for _ in range(rng.choice((0, 0, 1, 1, 2, 5))))
        ended = tuple(rng.sample(sorted(self.known), rng.randint(0, min(3, len(self.known)))))
        served = tuple(
            Service(rng.randrange(LINES), rng.choice(TENANTS), rng.choice((1.0, 0.1, 7 / 3, 40.0)))
            for _ in range(rng.randint(0, 3))
        )
        seen = tuple(rng.sample(sorted(self.granted), rng.randint(0, len(self.granted))))
        for request_id in ended:
            del self.known[request_id]
            self.granted.discard(request_id)
        for arrival in arrivals:
            self.known[arrival.request_id] = arrival
        self.last = Turn(self.name, self.number, self.fresh, self.rules, arrivals, served, ended, seen)
        return self.last

    def answered(self, answer: TurnAnswer) -> None:
        self.fresh = answer.lost
        self.granted |= {grant.request_id for grant in answer.grants if grant.request_id in self.known}
        for request_id in answer.refused:
            self.known.pop(request_id, None)

    def _arrival(self) -> Arrival:
        rng = self.rng
        self.count += 1
        line = rng.randrange(LINES)
        tokens = rng.randint(200, 800) if line >= LINES // 2 else rng.randint(1, 400)
        return Arrival(
            f"{self.name}-{self.count}",
            line,
            rng.choice(TENANTS),
            rng.randint(1_700_000_000_000, 1_700_000_000_050),
            tokens,
            tokens / rng.choice((1.0, 3.0)),
            rng.random() < 0.05,
        )
