"""The engine core as a process: a ZMQ loop around the synchronous `EngineCore`.

Layer: service. Takes requests off the link between steps, runs one step at a time and sends one frame per
step. It sleeps in the kernel while there is no work, but for one beat in which it says that it is well. It dies with
its front, and never serves HTTP, tokenises or decides anything: all policy is inside `EngineCore`.

Exit codes: 0 asked to stop, 1 a fault while running (reported by a CoreFault frame), 2 the configuration
can never work (reported likewise; starting again would not help).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from types import FrameType
from typing import TYPE_CHECKING

from dataplane.core_link import CoreEndpoint
from dataplane.errors import ConfigError
from dataplane.protocol import (
    AbortRequests,
    AddRequest,
    CoreFault,
    CoreStats,
    EngineRequest,
    FinishReason,
    FrontMessage,
    RequestOutput,
    Shutdown,
    StepOutput,
)
from dataplane.request import RequestError

if TYPE_CHECKING:
    from dataplane.engine import EngineCore

EXIT_STOPPED = 0
EXIT_FAULT = 1
EXIT_CONFIG = 2
"""The configuration can never work."""
STATS_INTERVAL_S = 0.25
_PR_SET_PDEATHSIG = 1


class CoreLoop:
    """Receive → step → send, until told to stop.

    `interrupted` is asked between steps: true once a signal wants the core to leave. `beat_s` is how often the front
    hears something, with or without work; a loop that is stuck says nothing.
    """

    def __init__(
        self,
        core: EngineCore,
        link: CoreEndpoint,
        *,
        interrupted: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        check_when_idle: bool = False,
        beat_s: float = 7.5,
    ) -> None:
        self._core = core
        self._link = link
        self._interrupted = interrupted
        self._clock = clock
        self._check_when_idle = check_when_idle
        self._beat_s = beat_s
        self._step = 0
        self._draining = False
        self._stop_now = False
        self._stats_at = float("-inf")
        self._was_busy = False

    def run(self) -> None:
        """Serve until a Shutdown message or a signal; outputs of aborted requests are still sent."""
        self._link.send(self._core.ready)
        self._send([], self._core.stats())
        while not self._interrupted():
            outputs: list[RequestOutput] = []
            for message in self._link.drain():
                outputs += self._take(message)
            if self._stop_now or (self._draining and not self._core.has_work()):
                self._send(outputs, self._core.stats())
                return
            if self._core.has_work():
                outputs += self._core.step()
                self._step += 1
            self._report(outputs)
            if not (self._core.has_work() or self._draining):
                self._link.wait(self._beat_s)
            elif pause_s := self._core.pause_s:
                self._link.wait(min(pause_s, self._beat_s))

    def _report(self, outputs: list[RequestOutput]) -> None:
        """Send this step's frame; statistics ride along at intervals, with every beat and whenever it falls idle."""
        busy = self._core.has_work()
        now = self._clock()
        fell_idle = not busy and (self._was_busy or bool(outputs))
        self._was_busy = busy
        due = now - self._stats_at >= (min(STATS_INTERVAL_S, self._beat_s) if busy else self._beat_s)
        stats = self._core.stats() if due or fell_idle else None
        if fell_idle and self._check_when_idle:
            self._core.check_integrity()
        if outputs or stats is not None:
            self._send(outputs, stats)

    def _send(self, outputs: list[RequestOutput], stats: CoreStats | None) -> None:
        if stats is not None:
            self._stats_at = self._clock()
        self._link.send(StepOutput(boot_epoch=self._link.epoch, step=self._step, outputs=outputs, stats=stats))

    def _take(self, message: FrontMessage) -> list[RequestOutput]:
        match message:
            case AddRequest(request=request):
                if self._draining:
                    return _refused(request, RequestError("the engine core is shutting down", "engine_unavailable"))
                try:
                    self._core.add(request)
                except RequestError as error:
                    return _refused(request, error)
                return []
            case AbortRequests(request_ids=request_ids):
                return self._core.abort(request_ids)
            case Shutdown(drain=drain):
                self._draining = True
                self._stop_now = not drain
                return []


def _refused(request: EngineRequest, error: RequestError) -> list[RequestOutput]:
    """The end of a request and of the forks it would have had."""
    return [
        RequestOutput(
            request_id=request_id,
            finish=FinishReason.ERROR,
            error=error.message,
            error_code=error.code,
            error_param=error.param,
        )
        for request_id in (request.request_id, *request.forks)
    ]


class _Signals:
    """SIGTERM asks the loop to leave between two steps."""

    def __init__(self) -> None:
        self.stop = False
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        # The wake-up descriptor ends a sleeping poll, which Python would otherwise resume after the handler.
        signal.set_wakeup_fd(self._writer.fileno())
        signal.signal(signal.SIGTERM, self._on_stop)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = True


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the front is gone; leave at once if it already is."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(EXIT_STOPPED)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dataplane.core_process", description="Run one engine core.")
    parser.add_argument("--address", required=True, help="ZMQ address of the front")
    parser.add_argument("--epoch", required=True, type=int, help="boot epoch of this core")
    parser.add_argument("--parent", required=True, type=int, help="process id of the front")
    parser.add_argument("--model", required=True, help="model name or path")
    parser.add_argument("--options", default="{}", help="engine configuration overrides as JSON")
    parser.add_argument("--check-when-idle", action="store_true", help="verify block accounting whenever idle")
    parser.add_argument("--beat", required=True, type=float, help="seconds in which the front hears something")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    # Ctrl-C reaches the whole process group; when the core ends is the front's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with CoreEndpoint(options.address, options.epoch) as link:
        try:
            core = _build(options)
        except ConfigError as error:
            link.send(CoreFault(boot_epoch=options.epoch, error=str(error)))
            return EXIT_CONFIG
        except Exception as error:
            return _fault(link, error)
        # Until here SIGTERM simply ends the process: there is nothing to put in order while loading.
        signals = _Signals()
        link.watch(signals.reader.fileno())
        loop = CoreLoop(
            core,
            link,
            interrupted=lambda: signals.stop,
            check_when_idle=options.check_when_idle,
            beat_s=options.beat,
        )
        return _serve(core, link, loop)


def _serve(core: EngineCore, link: CoreEndpoint, loop: CoreLoop) -> int:
    """Run the loop to its end. A fault is told before the core is closed, which waits for the steps under way."""
    with closing(core):
        try:
            loop.run()
        except Exception as error:
            return _fault(link, error)
    return EXIT_STOPPED


def _build(options: argparse.Namespace) -> EngineCore:
    """Load the model. Importing the engine takes seconds, so it comes after the ties to the front are in place."""
    from dataplane.config import EngineConfig
    from dataplane.engine import EngineCore

    core = EngineCore(EngineConfig.resolve(options.model, boot_epoch=options.epoch, **json.loads(options.options)))
    # What is there now stays: the garbage collector need not walk through it in the middle of a step.
    gc.collect()
    gc.freeze()
    return core


def _fault(link: CoreEndpoint, error: Exception) -> int:
    traceback.print_exception(error)
    link.send(CoreFault(boot_epoch=link.epoch, error=f"{type(error).__name__}: {error}"))
    return EXIT_FAULT


if __name__ == "__main__":
    sys.exit(main())
