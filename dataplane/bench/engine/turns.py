"""Two sides in turns: ours, theirs, theirs, ours, so that what drifts over a run favours neither.

Layer: service. Only one side computes at a time: before its turn both have come to rest, and afterwards the other's
CPU time says that it stayed so. What a figure means is the load's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dataplane.bench.engine.client import Caller
from dataplane.bench.engine.prompts import Prompts
from dataplane.bench.engine.server import IDLE_SHARE
from dataplane.bench.engine.workloads import Figures, Plan, Workload
from dataplane.bench.errors import SideError

OURS, PEER = 0, 1
ENDING_S = 2.0
"""How long a server whose connection broke is given to end, so that its end is what is told."""
IDLE_SECONDS = 0.1
"""CPU time that is allowed whatever the share: a health check, a report."""


class Watched(Protocol):
    """What a turn must know of a server."""

    @property
    def name(self) -> str: ...

    def cpu_seconds(self) -> float: ...

    def settle(self) -> None: ...

    def check(self, within: float = 0.0) -> None: ...


@dataclass(frozen=True, slots=True)
class Side:
    """A server, and who asks it."""

    server: Watched
    caller: Caller


@dataclass(slots=True)
class Measured:
    """Figures of each turn: `figures[side][i]` is of pair i. `order` names the sides as they took their turns."""

    figures: tuple[list[Figures], ...]
    order: list[str] = field(default_factory=list)
    idle_share: float = 0.0
    """The most CPU time, in cores, that a side took while it was the other's turn."""


def order_of(pair: int, sides: int) -> Sequence[int]:
    """Which side comes first: ours in even pairs, theirs in odd ones."""
    return range(sides) if pair % 2 == 0 else range(sides)[::-1]


class Turns:
    """Takes turns between one side or two."""

    def __init__(self, sides: Sequence[Side], prompts: Prompts) -> None:
        self._sides = sides
        self._prompts = prompts

    async def take(self, workload: Workload, pairs: int, done: Callable[[], None]) -> Measured:
        """Each side once to warm up, then `pairs` pairs; `done` is called after each pair. Raises SideError."""
        for index in range(len(self._sides)):
            await self._turn(workload, index, workload.plan(self._prompts))
        measured = Measured(tuple([] for _ in self._sides))
        for pair in range(pairs):
            plan = workload.plan(self._prompts)
            for index in order_of(pair, len(self._sides)):
                figures, idle = await self._turn(workload, index, plan)
                measured.figures[index].append(figures)
                measured.order.append(self._sides[index].server.name)
                measured.idle_share = max(measured.idle_share, idle)
            done()
        return measured

    async def _turn(self, workload: Workload, index: int, plan: Plan) -> tuple[Figures, float]:
        """The figures, and the other side's CPU time as a share of a core."""
        for side in self._sides:
            side.server.settle()
        others = [side.server for position, side in enumerate(self._sides) if position != index]
        before, begun = [server.cpu_seconds() for server in others], time.monotonic()
        try:
            figures = await workload.run(self._sides[index].caller, plan)
        except SideError:
            # A connection breaks before the process that held it is seen to have ended.
            self._sides[index].server.check(ENDING_S)
            raise
        seconds = time.monotonic() - begun
        taken = [server.cpu_seconds() - was for server, was in zip(others, before, strict=True)]
        for server, spent in zip(others, taken, strict=True):
            if spent > max(IDLE_SECONDS, IDLE_SHARE * seconds):
                raise SideError(f"{server.name} computed for {spent:.1f} s while it was the other's turn")
        return figures, max(taken, default=0.0) / seconds
