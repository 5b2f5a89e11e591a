"""The front's hold on its engine core: start it, talk to it, notice its death or its silence, start it again.

Layer: service. Hands every output of a step to the sink of its request, ends all requests in flight the
moment the core is gone, and restarts it with a higher epoch after a jittered, growing pause. It knows no HTTP
and no text; it never retries a request (the gateway may).

States: STARTING → READY → FAILED(reason) → STARTING … A configuration that can never work ends in FAILED for
good (`hopeless` is set). A core that is READY says something with every beat, whether or not there is work: after
half of `CoreSpec.stall_s` in silence it is DRAINING (what runs may go on, nothing new is taken) until its next word,
and after all of it the core is hung: it is killed and lost like one that crashed. A core that reported a fault has as
long to exit. How long it may load is not watched here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dataplane.core_link import (
    CoreBusyError,
    CoreUnreachableError,
    FrontEndpoint,
    UnreadableFrameError,
    identity_of,
)
from dataplane.core_process import EXIT_CONFIG
from dataplane.protocol import (
    AbortRequests,
    AddRequest,
    CoreFault,
    CoreMessage,
    CoreReady,
    CoreStats,
    EngineRequest,
    FinishReason,
    ReplicaState,
    RequestOutput,
    Shutdown,
    StepOutput,
)

logger = logging.getLogger(__name__)

TERMINATE_AFTER_S = 3.0
KILL_AFTER_S = 3.0
BEATS_TO_STALL = 8
"""Beats without a word that make a core hung; half as many make it doubtful."""

Sink = Callable[[RequestOutput], None]


class CoreUnavailableError(Exception):
    """The core cannot take a request now; `reason` says why in one sentence, `retry_after_s` when to ask again."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a core."""

    model: str
    """Model name or path, as `EngineConfig.resolve` takes it."""
    options: Mapping[str, Any] = {}
    """Engine configuration overrides."""
    check_when_idle: bool = False
    """Verify the block accounting whenever the core falls idle."""
    stall_s: float = 60.0
    """A core that was ready and says nothing for this long is hung. The longest step must be well below half of it."""
    command: tuple[str, ...] = (
        sys.executable,
        *(["-P"] if sys.flags.safe_path else []),
        "-m",
        "dataplane.core_process",
    )
    """Program and leading arguments."""

    @property
    def beat_s(self) -> float:
        """How often a healthy core says something, unless a step takes longer."""
        return self.stall_s / BEATS_TO_STALL

    def arguments(self, *, address: str, epoch: int, parent: int) -> list[str]:
        return [
            *self.command,
            *("--address", address),
            *("--epoch", str(epoch)),
            *("--parent", str(parent)),
            *("--model", self.model),
            *("--options", json.dumps(dict(self.options))),
            *("--beat", str(self.beat_s)),
            *(["--check-when-idle"] if self.check_when_idle else []),
        ]


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses between restarts: `first_s` doubled up to `longest_s`, each scaled by a random 0.5 to 1."""

    first_s: float = 0.5
    longest_s: float = 30.0
    stable_s: float = 60.0
    """A core that spoke for this long after its start starts the count anew."""

    def pause(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after the `failures`-th failure in a row (1 is the first)."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 16)) * rng.uniform(0.5, 1.0)


class CoreClient:
    """One core at a time. All methods belong to the event loop that called `start`.

    `on_change` is called after every change of state, `on_stats` with the core's epoch for every CoreStats;
    both must return quickly and not raise. `folder` is where the link's socket lies, see `FrontEndpoint`.
    """

    def __init__(
        self,
        spec: CoreSpec,
        *,
        on_change: Callable[[], None],
        on_stats: Callable[[int, CoreStats], None],
        restart: RestartPolicy | None = None,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._spec = spec
        self._on_change = on_change
        self._on_stats = on_stats
        self._policy = restart or RestartPolicy()
        self._folder = folder
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self.state = ReplicaState.STARTING
        self.reason = "the engine core is loading its model"
        self.epoch = 0
        self.restarts = 0
        self.hopeless = asyncio.Event()
        self.ready: CoreReady | None = None
        self._sinks: dict[str, Sink] = {}
        self._aborts: dict[str, None] = {}
        self._alive = False
        self._fault = ""
        self._load_s = 5.0
        self._heard_at = clock()
        self._silent_beats = 0
        self._stopping = False
        self._link: FrontEndpoint | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin starting the core; returns at once, `on_change` tells of READY."""
        self._link = FrontEndpoint(self._folder)
        self._tasks = [
            asyncio.create_task(self._receive(self._link), name="core-receive"),
            asyncio.create_task(self._supervise(self._link), name="core-supervise"),
            asyncio.create_task(self._watch(), name="core-watch"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    @property
    def in_flight(self) -> int:
        """Sequences given to the core whose last output has not come."""
        return len(self._sinks)

    @property
    def process_id(self) -> int | None:
        """Process id of the running core."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    def submit(self, request: EngineRequest, sink: Sink, *fork_sinks: Sink) -> None:
        """Give one sequence to the core; `sink` gets every output, the last one with `finish` set. `fork_sinks` are
        those of the request's forks, in order.

        Raises CoreUnavailableError when the core is not ready or has fallen behind.
        """
        if self.state is not ReplicaState.READY or self._link is None:
            raise CoreUnavailableError(self.reason, self.retry_after_s())
        try:
            self._link.send(self.epoch, AddRequest(request=request, boot_epoch=self.epoch))
        except CoreBusyError:
            raise CoreUnavailableError("the engine core has too many requests queued", 1.0) from None
        except CoreUnreachableError:
            raise CoreUnavailableError("the engine core is not connected", self.retry_after_s()) from None
        self._sinks[request.request_id] = sink
        self._sinks.update(zip(request.forks, fork_sinks, strict=True))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Free these sequences in the core at once; each still gets its last output. Unknown ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._sinks]
        if known:
            self._aborts.update(dict.fromkeys(known))
            self._send_aborts()

    def retry_after_s(self) -> float:
        """How long a refused caller should wait: about one model load."""
        return max(1.0, self._load_s)

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Stop the core: let it finish for up to `drain_s`, then end it by message, SIGTERM and SIGKILL in turn."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            await self._stop_process(process, drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_all("the replica is shutting down", FinishReason.ABORT)
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _stop_process(self, process: asyncio.subprocess.Process, drain_s: float) -> None:
        if self._link is not None and self.ready is not None:
            with contextlib.suppress(CoreBusyError, CoreUnreachableError):
                self._link.send(self.epoch, Shutdown(drain=drain_s > 0.0, boot_epoch=self.epoch))
        else:
            # A core that is still loading takes no messages.
            process.terminate()
        steps = ((drain_s + TERMINATE_AFTER_S, process.terminate), (KILL_AFTER_S, process.kill))
        for patience, action in steps:
            try:
                async with asyncio.timeout(patience):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    action()
            else:
                return
        await process.wait()

    # Receiving -----------------------------------------------------------------------------------------------

    async def _receive(self, link: FrontEndpoint) -> None:
        while True:
            # What a dead core left in the queue is dropped: its requests have ended already.
            try:
                identity, message = await link.receive()
            except UnreadableFrameError as error:
                # Whose outputs were in it nobody can tell: they would wait for ever.
                if self._alive and error.identity == identity_of(self.epoch):
                    self._kill(f"the engine core sent an unreadable frame: {error}")
                continue
            if self._alive and identity == identity_of(self.epoch) and message.boot_epoch == self.epoch:
                self._take(message)

    def _take(self, message: CoreMessage) -> None:
        self._heard_at = self._clock()
        self._silent_beats = 0
        if self.state is ReplicaState.DRAINING and not isinstance(message, CoreFault):
            self._change(ReplicaState.READY, "")
        match message:
            case CoreReady():
                self.ready = message
                self._load_s = message.load_seconds or self._load_s
                logger.info(
                    "the engine core runs %s: %s forward %s, %s weights of %d MiB",
                    message.model,
                    message.forward or "unknown",
                    f"on {message.kernel_tier}" if message.kernel_tier else "without kernels of its own",
                    message.weights or "unknown",
                    message.weight_bytes >> 20,
                )
                self._change(ReplicaState.READY, "")
            case StepOutput(outputs=outputs, stats=stats):
                for output in outputs:
                    self._deliver(output)
                if stats is not None:
                    self._on_stats(self.epoch, stats)
                if self._aborts:
                    self._send_aborts()
            case CoreFault(error=error):
                self._fault = error
                if self.ready is not None:
                    self._lose_core(f"the engine core failed: {error}")

    def _deliver(self, output: RequestOutput) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is None:
            return
        if output.finish is not None:
            del self._sinks[output.request_id]
            self._aborts.pop(output.request_id, None)
        sink(output)

    def _send_aborts(self) -> None:
        """Send what is waiting; what the core cannot take yet goes with its next frame."""
        if self._link is None:
            return
        try:
            self._link.send(self.epoch, AbortRequests(request_ids=list(self._aborts), boot_epoch=self.epoch))
        except (CoreBusyError, CoreUnreachableError):
            return
        self._aborts.clear()

    # Life and death ------------------------------------------------------------------------------------------

    async def _supervise(self, link: FrontEndpoint) -> None:
        failures = 0
        while True:
            self.epoch += 1
            started = self._clock()
            code = await self._run_core(link)
            if self._stopping:
                return
            self._lose_core(_death(code, self._fault, was_ready=self.ready is not None))
            if code == EXIT_CONFIG:
                self.hopeless.set()
                return
            failures = 1 if self._heard_at - started >= self._policy.stable_s else failures + 1
            pause = self._policy.pause(failures, self._rng)
            logger.warning("%s; starting it again in %.1f s", self.reason, pause)
            await asyncio.sleep(pause)
            self.restarts += 1
            self._change(ReplicaState.STARTING, f"restarting: {self.reason}")

    async def _run_core(self, link: FrontEndpoint) -> int | None:
        """Start a core and wait for its end; its exit code, or None when it could not be started."""
        arguments = self._spec.arguments(address=link.address, epoch=self.epoch, parent=os.getpid())
        self._fault = ""
        self._alive = True
        try:
            self._process = await asyncio.create_subprocess_exec(*arguments, stdin=asyncio.subprocess.DEVNULL)
        except OSError as error:
            self._fault = f"cannot start the process: {error}"
            return None
        return await self._process.wait()

    async def _watch(self) -> None:
        """Count the beats that pass without a word. It is not time that is measured: a front that was itself held up
        has at most one beat to count before it hears what the core said meanwhile."""
        while True:
            await asyncio.sleep(self._spec.beat_s)
            loading = self._alive and self.ready is None and not self._fault
            if self.process_id is None or loading:
                continue
            self._silent_beats += 1
            # The first beat of a silence may have been almost over when it began.
            if self._silent_beats > BEATS_TO_STALL:
                self._kill_silent()
            elif self._silent_beats > BEATS_TO_STALL // 2 and self.state is ReplicaState.READY:
                silence = f"the engine core has said nothing for {self._spec.stall_s / 2:g} s"
                self._change(ReplicaState.DRAINING, silence)

    def _kill_silent(self) -> None:
        """End a core that hangs, or that should have ended by itself."""
        self._silent_beats = 0
        if self._fault:
            self._kill(f"the engine core failed: {self._fault}")
        else:
            self._kill(f"the engine core hung: no answer for {self._spec.stall_s:g} s")
            logger.error("--core-stall-seconds must be well above the longest step")

    def _kill(self, reason: str) -> None:
        """Lose the core. SIGKILL, because it may be stopped; `_supervise` sees its end."""
        self._lose_core(reason)
        logger.error("%s; killing it", self.reason)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _lose_core(self, reason: str) -> None:
        """The core is gone: every request in flight ends now."""
        if self._alive:
            self._alive = False
            self.ready = None
            self._change(ReplicaState.FAILED, reason)
            self._end_all(reason, FinishReason.ERROR)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A defect in this module must not leave requests hanging: fail for good and say so."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("%s ended: %r", task.get_name(), error, exc_info=error)
            self._alive = True
            self._lose_core(f"internal error in the replica's front: {error!r}")
            self.hopeless.set()

    def _end_all(self, reason: str, finish: FinishReason) -> None:
        sinks, self._sinks = self._sinks, {}
        self._aborts.clear()
        for request_id, sink in sinks.items():
            sink(RequestOutput(request_id=request_id, finish=finish, error=reason))

    def _change(self, state: ReplicaState, reason: str) -> None:
        self.state = state
        self.reason = reason
        self._on_change()


def _death(code: int | None, fault: str, *, was_ready: bool) -> str:
    """One sentence on why the core ended."""
    if code == EXIT_CONFIG and fault:
        return fault
    if fault:
        return f"the engine core failed: {fault}"
    when = "" if was_ready else " while loading its model"
    if code is not None and code < 0:
        return f"the engine core was killed by {signal.Signals(-code).name}{when}"
    return f"the engine core exited with code {code}{when}"
