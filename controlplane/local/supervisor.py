"""Keeps units alive: starts them, restarts what ends, stops them in order.

Layer: service. One thread, no polling: it waits on the children's pidfds and on its own timers. It never outlives
a request to stop, and a guardian ends everything should it be killed itself.
"""

from __future__ import annotations

import contextlib
import enum
import random
import secrets
import select
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from controlplane.local import logs
from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.guardian import MARK, Guardian
from controlplane.local.process import Unit

PROBE_EVERY_S = 0.1
BOUND_LOGS_EVERY_S = 10.0
FIRST_RESTART_S = 0.2
LONGEST_RESTART_S = 30.0
STABLE_AFTER_S = 60.0
"""A unit that served this long starts again with a clean record."""
LOOPING_AFTER = 6
"""Failures in a row that make a crash loop: from then on one attempt every `LOOPING_RESTART_S`."""
LOOPING_RESTART_S = 60.0


class State(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"


class Observer(Protocol):
    """Told what happens; it only shows it."""

    def starting(self, name: str) -> None: ...

    def ready(self, name: str, seconds: float) -> None: ...

    def ended(self, name: str, how: str, restart_in: float) -> None: ...

    def looping(self, name: str, line: str) -> None: ...

    def stopping(self, name: str) -> None: ...

    def trouble(self, name: str, message: str) -> None: ...


@dataclass(slots=True)
class Supervised:
    unit: Unit
    state: State = State.WAITING
    since: float = 0.0
    due: float = 0.0
    """When to probe (STARTING) or to start again (WAITING)."""
    failures: int = 0
    starts: int = 0
    log_begin: int = field(default=0)
    registered: int | None = None
    """The pid the guardian watches."""


def restart_delay(failures: int, rng: random.Random) -> float:
    """Seconds before the next start after `failures` in a row: doubling, bounded, jittered by ±30 %."""
    if failures >= LOOPING_AFTER:
        base = LOOPING_RESTART_S
    else:
        base = min(FIRST_RESTART_S * 2 ** (failures - 1), LONGEST_RESTART_S)
    return base * rng.uniform(0.7, 1.3)


class Supervisor:
    """Owns the units from `launch` to `stop`. Use from the main thread only."""

    def __init__(self, observer: Observer, rng: random.Random | None = None) -> None:
        self.mark = secrets.token_hex(8)
        self._observer = observer
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._supervised: list[Supervised] = []
        self._guardian = Guardian(self.mark)
        self._bound_logs_at = 0.0
        self._stopped = False

    @property
    def environment(self) -> dict[str, str]:
        """Goes into every child's environment, so that the guardian finds grandchildren too."""
        return {MARK: self.mark}

    @property
    def guardian_pid(self) -> int:
        return self._guardian.pid

    def pids(self) -> dict[str, int]:
        """The running units' processes."""
        return {s.unit.name: s.unit.child.pid for s in self._supervised if s.unit.child is not None}

    def launch(self, units: Sequence[Unit]) -> None:
        """Begin `units` in order, then wait until all are ready. Raises LocalError when one fails to."""
        fresh = [Supervised(unit) for unit in units]
        for each in fresh:
            self._supervised.append(each)
            self._begin(each)
        while any(each.state is not State.READY for each in fresh):
            self.turn()
            for each in fresh:
                if each.failures:
                    self._raise_failed_start(each)

    def run(self) -> None:
        """Until KeyboardInterrupt."""
        while True:
            self.turn()

    def turn(self, longest: float = 60.0) -> None:
        """Wait for the next event or timer, at most `longest` seconds, and deal with it."""
        now = time.monotonic()
        timers = [each.due for each in self._supervised if each.state is not State.READY]
        timers += [self._bound_logs_at, now + longest]
        ended = self._wait(max(min(timers) - now, 0.0))
        if self._guardian.pidfd in ended:
            self._replace_guardian()
        for each in self._supervised:
            child = each.unit.child
            if child is not None and child.pidfd in ended:
                self._ended(each, _describe(child.wait(5.0)))
        now = time.monotonic()
        for each in self._supervised:
            if each.due <= now:
                self._advance(each, now)
        if now >= self._bound_logs_at:
            self._bound_logs_at = now + BOUND_LOGS_EVERY_S
            for each in self._supervised:
                with contextlib.suppress(OSError):
                    logs.bound(each.unit.log)

    def stop(
        self,
        order: Sequence[str] = (),
        *,
        early: Collection[str] = (),
        interruptible: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> bool:
        """Stop every unit: those named in `order` first, in that order, then the others, the youngest first.

        Those named in `early`, which nobody needs for an orderly end, are asked to end (SIGTERM) before all others and
        waited for in their turn. A KeyboardInterrupt while one is waited for, which is within an `interruptible`, kills
        what is left at once; then False is returned. Nothing is left to do for a second call.
        """
        if self._stopped:
            return True
        self._stopped = True
        rank = {name: position for position, name in enumerate(order)}
        youngest_first = list(reversed(self._supervised))
        youngest_first.sort(key=lambda each: rank.get(each.unit.name, len(rank)))
        orderly = True
        for each in youngest_first:
            if each.unit.name in early and each.unit.child is not None:
                each.unit.child.ask(signal.SIGTERM)
        while youngest_first:
            each = youngest_first[0]
            try:
                if each.unit.child is not None:
                    self._observer.stopping(each.unit.name)
                with interruptible():
                    self._halt(each, None if orderly else 0.0)
                youngest_first.pop(0)
            except KeyboardInterrupt:
                orderly = False
        self._supervised.clear()
        self._guardian.dismiss()
        return orderly

    # -- one unit ------------------------------------------------------------------------------------------

    def _begin(self, each: Supervised) -> None:
        self._observer.starting(each.unit.name)
        each.log_begin = each.unit.log.stat().st_size if each.unit.log.exists() else 0
        each.starts += 1
        each.since = time.monotonic()
        each.state = State.STARTING
        each.due = each.since
        try:
            each.unit.begin()
        finally:
            if each.unit.child is not None:
                each.registered = each.unit.child.pid
                self._guardian.watch(each.registered)

    def _advance(self, each: Supervised, now: float) -> None:
        """A timer of a unit that is not ready is due."""
        if each.state is State.STARTING:
            if each.unit.is_ready():
                each.state = State.READY
                self._observer.ready(each.unit.name, time.monotonic() - each.since)
                each.since = time.monotonic()
            elif now - each.since > each.unit.ready_within:
                self._ended(each, f"not ready after {each.unit.ready_within:.0f} s")
            else:
                each.due = time.monotonic() + PROBE_EVERY_S
        elif each.state is State.WAITING:
            try:
                self._begin(each)
            except LocalError as error:
                self._ended(each, error.message)

    def _ended(self, each: Supervised, how: str) -> None:
        served = time.monotonic() - each.since if each.state is State.READY else 0.0
        each.failures = 1 if served >= STABLE_AFTER_S else each.failures + 1
        self._halt(each, 0.0)
        each.state = State.WAITING
        delay = restart_delay(each.failures, self._rng)
        each.due = time.monotonic() + delay
        if each.failures == LOOPING_AFTER:
            self._observer.looping(each.unit.name, logs.last_line(each.unit.log, each.log_begin))
        self._observer.ended(each.unit.name, how, delay)

    def _halt(self, each: Supervised, grace: float | None) -> None:
        """End a unit. What could not be written down about it is told; the others are dealt with all the same."""
        try:
            each.unit.stop(grace=grace)
        except LocalError as error:
            self._observer.trouble(each.unit.name, error.message)
        self._forget(each)

    def _forget(self, each: Supervised) -> None:
        if each.registered is not None:
            self._guardian.forget(each.registered)
            each.registered = None

    def _raise_failed_start(self, each: Supervised) -> None:
        said = logs.last_line(each.unit.log, each.log_begin)
        detail = f": {said}" if said else ""
        raise LocalError(f"{each.unit.name} did not start (log: {each.unit.log}){detail}", ExitCode.START_FAILED)

    # -- waiting -------------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> set[int]:
        """The pidfds that became readable within `seconds`."""
        poller = select.poll()
        poller.register(self._guardian.pidfd, select.POLLIN)
        for each in self._supervised:
            if each.unit.child is not None and each.unit.child.pidfd is not None:
                poller.register(each.unit.child.pidfd, select.POLLIN)
        return {descriptor for descriptor, _ in poller.poll(seconds * 1000.0)}

    def _replace_guardian(self) -> None:
        self._guardian.close()
        self._guardian = Guardian(self.mark)
        for each in self._supervised:
            if each.registered is not None:
                self._guardian.watch(each.registered)


def _describe(status: int | None) -> str:
    if status is None:
        return "ended"
    return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
