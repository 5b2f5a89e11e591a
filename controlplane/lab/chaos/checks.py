"""What must hold after every fault, as functions of what was seen.

Layer: service. Pure: each check answers with sentences that say what does not hold, none when all does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

SHOWN = 3
"""Attempts named by one sentence."""


class Tokens(NamedTuple):
    """What an attempt used."""

    prompt: int
    output: int


class Row(NamedTuple):
    """An attempt as the ledger has it."""

    basis: str
    prompt: int
    output: int


class Standing(NamedTuple):
    """A limit's counter in the store. `concurrent` counters are of what runs now."""

    name: str
    used: int
    limit: int | None
    concurrent: bool


@dataclass(slots=True)
class Answers:
    """How requests ended, as their clients saw it. `refused` is by status and code, such as `429 x_exceeded`."""

    requests: int = 0
    ok: int = 0
    left: int = 0
    """The client left on purpose."""
    cut: int = 0
    """The answer began and did not end as it must."""
    unanswered: int = 0
    """No answer at all: connection refused or reset."""
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def unauthorised(self) -> int:
        return sum(number for code, number in self.refused.items() if code.startswith("401"))


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a fault may do to requests. `codes` are refusals besides those of limits that are reached (429)."""

    codes: frozenset[str] = frozenset()
    cut: bool = False
    unanswered: bool = False


NOTHING_ALLOWED = Allowed()


@dataclass(frozen=True, slots=True)
class Difference:
    """Ledger against engines. `tokens` is ledger less engines over the attempts that engines counted; `told_by_others`
    are attempts that no engine has a record of, because it was killed, in the gateway's count.
    """

    tokens: int
    attempts: int
    told_by_others: int
    problems: tuple[str, ...]


NO_DIFFERENCE = Difference(0, 0, 0, ())


def compare(engines: Mapping[str, Tokens], ledger: Mapping[str, Row]) -> Difference:
    """Attempt by attempt, to the token."""
    missing = sorted(set(engines) - set(ledger))
    wrong = sorted(
        attempt
        for attempt, row in ledger.items()
        if attempt in engines and (row.prompt, row.output) != engines[attempt]
    )
    foreign = sorted(attempt for attempt, row in ledger.items() if attempt not in engines)
    invented = [attempt for attempt in foreign if ledger[attempt].basis == "engine"]
    tokens = sum(row.prompt + row.output for attempt, row in ledger.items() if attempt in engines)
    tokens -= sum(used.prompt + used.output for used in engines.values())
    problems = []
    if missing:
        problems.append(f"{len(missing)} attempts are not in the ledger ({_some(missing)})")
    if wrong:
        problems.append(f"{len(wrong)} attempts have other tokens in the ledger than at their engine ({_some(wrong)})")
    if invented:
        problems.append(f"{len(invented)} attempts are in the ledger as counted by an engine that has no such record")
    return Difference(tokens, len(engines), len(foreign) - len(invented), tuple(problems))


def counters(standings: Iterable[Standing]) -> list[str]:
    """No counter is below zero."""
    return [f"{one.name} stands at {one.used}" for one in standings if one.used < 0]


def leak(standings: Iterable[Standing], gateways: Mapping[str, float], deferred: Mapping[str, float]) -> int:
    """The most that any in-flight count is above zero while nothing runs."""
    held = [one.used for one in standings if one.concurrent]
    return int(max([*held, *gateways.values(), *deferred.values()], default=0))


def in_flight(leaked: int | None, waited_s: float, ttl_s: float) -> list[str]:
    """Nothing is held once the time of leases is over; None says that not everybody could be asked."""
    if leaked == 0:
        return []
    after = f"{waited_s:.0f} s after the last request (leases last {ttl_s:g} s)"
    if leaked is None:
        return [f"it cannot be told what is in flight {after}"]
    return [f"{leaked} are still counted as in flight {after}"]


def answers(seen: Answers, allowed: Allowed) -> list[str]:
    """Nobody with a valid key gets 401, refusals have a declared reason, and only some faults cut anything."""
    problems = []
    if seen.unauthorised:
        problems.append(f"{seen.unauthorised} requests with a valid key got 401")
    strange = {
        code: number
        for code, number in seen.refused.items()
        if not code.startswith(("401", "429 ")) and code not in allowed.codes
    }
    problems += [f"{number} requests got {code}" for code, number in sorted(strange.items())]
    if seen.cut and not allowed.cut:
        problems.append(f"{seen.cut} answers were cut")
    if seen.unanswered and not allowed.unanswered:
        problems.append(f"{seen.unanswered} requests got no answer")
    if not seen.ok:
        problems.append("no request was served")
    return problems


def states(seen: Collection[str], expected: Collection[str]) -> list[str]:
    """Each of `expected` was shown by metrics or the API while the fault lasted."""
    return [f"nothing showed “{each}” while it lasted" for each in expected if each not in seen]


def recovery(seconds: float | None, within_s: float) -> list[str]:
    """Requests are served, and nothing is shown as wrong any more, within a bound."""
    return [] if seconds is not None else [f"it had not recovered {within_s:.0f} s after the fault was over"]


def _some(attempts: list[str]) -> str:
    shown = ", ".join(attempt[:12] for attempt in attempts[:SHOWN])
    return shown if len(attempts) <= SHOWN else f"{shown}, …"
