"""Replay of requests against a room of bounded size: who is refused waits as told and comes back.

Layer: service. Pure: the estimator is the product's (`admission.retry`), the clock is the replay's. Everybody obeys, so
that the herd a Retry-After gathers meets at the door.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from controlplane.admission.retry import Asker

TRANSIT_S = 0.02
"""Who comes back is so much later at the door than the refusal said, since the refusal had to travel too."""
MEAN_STAY_S = 2.0
CALM_S, RUSH_S = 40.0, 5.0
MOST_TRIES = 20
"""Who was refused so often gives up."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: when it first asks, and for how many seconds it stays once admitted. It comes back unchanged."""

    at: float
    stay: float
    asker: Asker


class Doorkeeper(Protocol):
    """Lets in, is told who leaves, says when to come back."""

    def admits(self, asker: Asker, in_flight: int, now: float) -> bool: ...

    def ended(self, now: float) -> None: ...

    def refuse(self, asker: Asker, now: float) -> int: ...


class Constant:
    """Sends everybody away for the same time: the control."""

    def __init__(self, limit: int, seconds: int = 1) -> None:
        self._limit = limit
        self._seconds = seconds

    def admits(self, asker: Asker, in_flight: int, now: float) -> bool:
        return in_flight < self._limit

    def ended(self, now: float) -> None:
        return None

    def refuse(self, asker: Asker, now: float) -> int:
        return self._seconds


@dataclass(slots=True)
class Outcome:
    """What became of them. `refusals` are tries that were refused, `returned` those of them that were tried again,
    `passed` those that passed then; `given_up` are visits that were refused `MOST_TRIES` times.
    """

    visits: int = 0
    refused_visits: int = 0
    refusals: int = 0
    returned: int = 0
    passed: int = 0
    given_up: int = 0
    waited_s: float = 0.0
    most_together: int = 0
    """Most that came back within one second."""

    @property
    def share(self) -> float | None:
        """Of the refusals that were waited for, those that passed."""
        return self.passed / self.returned if self.returned else None


def replay(visits: Iterable[Visit], doorkeeper: Doorkeeper) -> Outcome:
    """Play `visits`, past `doorkeeper`."""
    outcome = Outcome()
    leaving: list[float] = []
    coming: list[tuple[float, int, int, Visit]] = []
    for number, visit in enumerate(visits):
        outcome.visits += 1
        coming.append((visit.at, number, 0, visit))
    heapq.heapify(coming)
    together, second = 0, -1
    while coming:
        now, number, tries, visit = heapq.heappop(coming)
        while leaving and leaving[0] <= now:
            doorkeeper.ended(heapq.heappop(leaving))
        if tries:
            together, second = (together + 1, second) if int(now) == second else (1, int(now))
            outcome.most_together = max(outcome.most_together, together)
            outcome.returned += 1
        if doorkeeper.admits(visit.asker, len(leaving), now):
            outcome.passed += bool(tries)
            heapq.heappush(leaving, now + visit.stay)
            continue
        outcome.refusals += 1
        outcome.refused_visits += not tries
        if tries + 1 >= MOST_TRIES:
            outcome.given_up += 1
            continue
        wait = doorkeeper.refuse(visit.asker, now)
        outcome.waited_s += wait
        heapq.heappush(coming, (now + wait + TRANSIT_S, number, tries + 1, visit))
    return outcome


def bursts(rng: Random, seconds: float, room: int, *, calm: float, rush: float) -> list[Visit]:
    """Poisson arrivals that offer `calm` of the room and, for about 5 s in every 45, `rush` of it.

    Stays are log-normal with a mean of 2 s, sizes those of prompts of 200 tokens in the middle.
    """
    visits: list[Visit] = []
    now, rushing, per_s = 0.0, False, room / MEAN_STAY_S
    change = rng.expovariate(1 / CALM_S)
    while now < seconds:
        step = rng.expovariate(per_s * (rush if rushing else calm))
        if now + step > change:
            now, rushing = change, not rushing
            change += rng.expovariate(1 / (RUSH_S if rushing else CALM_S))
            continue
        now += step
        visits.append(Visit(now, _stay(rng), Asker(f"key-{min(int(rng.expovariate(0.2)), 39)}")))
    return [replace(each, asker=each.asker._replace(size=body_size(rng.lognormvariate(5.3, 0.9)))) for each in visits]


def of_one_size(visits: Iterable[Visit]) -> list[Visit]:
    """`visits` of which nothing tells those of one key apart."""
    return [replace(each, asker=Asker(each.asker.key)) for each in visits]


def body_size(prompt: float) -> int:
    """Bytes of the body of a request whose prompt has so many tokens."""
    return 100 + 4 * int(prompt)


def _stay(rng: Random) -> float:
    return rng.lognormvariate(0.3681, 0.8067)  # mean 2, standard deviation 1.9
