"""A replica: one engine core, what it serves, and what it tells of itself.

Layer: service. Joins the core client, the intake, the windows and the usage journal; takes calls and gives
back attempts. It speaks neither HTTP nor to the control plane: `server` and `reporter` do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from dataplane.api_error import ApiError, unavailable
from dataplane.attempt import Attempt, Choice
from dataplane.caller import Caller
from dataplane.core_client import CoreClient, CoreUnavailableError
from dataplane.detokenizer import IncrementalDetokenizer
from dataplane.grammar_check import GrammarChecker
from dataplane.intake import Intake, Prepared
from dataplane.openai import Call
from dataplane.protocol import (
    CoreReady,
    CoreStats,
    Counters,
    EngineRequest,
    Gauges,
    ReplicaState,
    SamplingParams,
    ServiceCounters,
)
from dataplane.replica_config import ReplicaConfig
from dataplane.tokenizer import Tokenizer
from dataplane.usage import UsageJournal
from dataplane.windows import WindowBook

logger = logging.getLogger(__name__)

ABORT_S = 1.0
"""How long a stopping replica waits for the core's last word on aborted requests."""


class Replica:
    """The replica's state and its verbs: `begin` an attempt, `drain`, `resume`.

    `changed` is set whenever the state changed or somebody should be told at once.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        tokenizer: Tokenizer,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the replica's folder; raises OSError when it is unusable."""
        self.config = config
        self.wall = wall
        self.monotonic = monotonic
        self.started_at = wall()
        config.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.boot_epoch = _next_epoch(config.folder / "boot-epoch", self.started_at)
        self.book = WindowBook(self.started_at)
        self.journal = UsageJournal(config.folder)
        self.gauges = Gauges()
        self.changed = asyncio.Event()
        self.core = CoreClient(
            config.core,
            on_change=self._core_changed,
            on_stats=self._take_stats,
            restart=config.restart,
            folder=config.folder / "ipc",
        )
        self.tokenizer = tokenizer
        self._grammars = GrammarChecker(config.model_path)
        self._intake = Intake(tokenizer, self._grammars, max_sequences=config.max_sequences)
        self._draining = ""
        self._stopping = False
        self._stats_epoch = 0
        self._stats = Counters()
        self._running: set[Attempt] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sequence = 0
        self._journal_task: asyncio.Task[None] | None = None

    @property
    def state(self) -> ReplicaState:
        """READY is the only state in which requests are taken."""
        return ReplicaState.DRAINING if self._leaving else self.core.state

    @property
    def _leaving(self) -> bool:
        """Draining because it was asked to, and not because its core is silent."""
        return bool(self._draining) and self.core.state is not ReplicaState.FAILED

    @property
    def reason(self) -> str:
        """One sentence on the state; empty when READY."""
        return self._draining if self._leaving else self.core.reason

    @property
    def ready(self) -> CoreReady | None:
        return self.core.ready

    async def start(self) -> None:
        """Start the core; returns before it is ready."""
        self._journal_task = asyncio.create_task(self.journal.run(), name="usage-journal")
        await self.core.start()

    def drain(self, reason: str = "asked to drain") -> None:
        """Take no new requests; running ones go on."""
        if not self._draining:
            logger.info("draining: %s", reason)
            self._draining = reason
            self.changed.set()

    def resume(self) -> None:
        """Take requests again after a drain; a replica that is being stopped does not."""
        if self._draining and not self._stopping:
            logger.info("serving again")
            self._draining = ""
            self.changed.set()

    async def stop(self, drain_s: float, *, hurry: asyncio.Event | None = None) -> None:
        """Let running requests go on for up to `drain_s` seconds or until `hurry`, abort the rest, stop the core."""
        self._stopping = True
        self.drain("shutting down")
        await _first_of(drain_s, self._idle, *([hurry] if hurry else []))
        for attempt in list(self._running):
            attempt.cancel()
        await _first_of(ABORT_S, self._idle)
        await self.core.stop()
        await self._grammars.stop()
        if self._journal_task is not None:
            self._journal_task.cancel()
            await asyncio.gather(self._journal_task, return_exceptions=True)
        await self.journal.sync()

    # Requests ------------------------------------------------------------------------------------------------

    async def begin(self, call: Call, caller: Caller, accepted: float) -> Attempt:
        """Tokenise, check and give the call to the core. Raises ApiError; nothing is left behind then."""
        self.check_open()
        prepared = await self._intake.prepare(call, self._ready())
        self.check_open()
        if self.core.in_flight + prepared.sequences > self.config.max_sequences:
            raise unavailable("the replica has too many requests in flight", code="overloaded", retry_after_s=1.0)
        return self._submit(call, caller, accepted, prepared)

    async def count(self, call: Call) -> list[int]:
        """Tokens of each of the call's prompts. Raises ApiError; 503 while no core has told the model's context."""
        return await self._intake.count(call, self._ready())

    def check_open(self) -> None:
        """Raises ApiError 503 unless new requests are taken now."""
        if self.state is not ReplicaState.READY:
            raise self._unavailable()

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)

    def service(self) -> ServiceCounters:
        return self.book.counters(self.wall()).service

    def ended(self, attempt: Attempt) -> None:
        """An attempt's last sequence has ended: keep its usage record."""
        self._running.discard(attempt)
        if not self._running:
            self._idle.set()
        config = self.config
        self.journal.add(attempt.usage_record(pool=config.pool, replica=config.replica, boot_epoch=self.boot_epoch))

    def _submit(self, call: Call, caller: Caller, accepted: float, prepared: Prepared) -> Attempt:
        attempt = Attempt(caller, self, accepted=accepted, model=self.config.served_model)
        for prompt, params in zip(prepared.prompts, prepared.params, strict=True):
            choices = self._choices(attempt, prompt, params, prepared.samples)
            first = choices[0]
            request = EngineRequest(
                request_id=first.request_id,
                prompt_token_ids=prompt,
                params=params,
                arrived_at=self.monotonic(),
                tenant=caller.tenant,
                priority=caller.priority,
                fair_tag=caller.fair_tag,
                cache_salt=caller.salt,
                forks=tuple(choice.request_id for choice in choices[1:]),
                # Log-probabilities of a prompt come from computing it; the cache holds none.
                read_cache=params.prompt_logprobs is None,
            )
            try:
                self.core.submit(request, *(choice.take for choice in choices))
            except CoreUnavailableError as error:
                attempt.cancel()
                raise unavailable(error.reason, code="engine_unavailable", retry_after_s=error.retry_after_s) from None
            attempt.choices += choices
            self._running.add(attempt)
            self._idle.clear()
        self.service().received += prepared.sequences
        return attempt

    def _choices(self, attempt: Attempt, prompt: list[int], params: SamplingParams, samples: int) -> list[Choice]:
        """One for each sample of `prompt`."""
        choices: list[Choice] = []
        for _ in range(samples):
            self._sequence += 1
            choices.append(
                Choice(
                    attempt,
                    len(attempt.choices) + len(choices),
                    f"{attempt.caller.attempt_id}-{self._sequence}",
                    prompt,
                    IncrementalDetokenizer(self.tokenizer, params.stop, min_tokens=params.min_tokens),
                    source=choices[0] if choices else None,
                    logprobs=params.logprobs is not None,
                )
            )
        return choices

    def _ready(self) -> CoreReady:
        if self.core.ready is None:
            raise self._unavailable()
        return self.core.ready

    def _unavailable(self) -> ApiError:
        code = "draining" if self._leaving else "engine_unavailable"
        return unavailable(
            f"the replica is {self.state}: {self.reason}", code=code, retry_after_s=self.core.retry_after_s()
        )

    # What the core tells -------------------------------------------------------------------------------------

    def _core_changed(self) -> None:
        if self.core.ready is None:
            # The dead core's state is gone with it; its blocks are nobody's.
            self.gauges = Gauges()
        logger.info("%s%s", self.state, f": {self.reason}" if self.reason else "")
        self.changed.set()

    def _take_stats(self, epoch: int, stats: CoreStats) -> None:
        """Counters of a core start at zero with it, so differences are taken within one epoch."""
        if epoch != self._stats_epoch:
            self._stats_epoch = epoch
            self._stats = Counters()
        now = self.wall()
        self.book.counters(now).merge(stats.counters.since(self._stats))
        self._stats = stats.counters
        self.gauges = stats.gauges
        self.book.peak(now, stats.gauges)


async def _first_of(timeout_s: float, *events: asyncio.Event) -> None:
    """Wait until one of the events is set, or for `timeout_s`."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


def _next_epoch(path: Path, now: float) -> int:
    """A number above every earlier boot's, even when the clock was set back: milliseconds, kept on disk."""
    earlier = 0
    with contextlib.suppress(FileNotFoundError, ValueError):
        earlier = int(path.read_text())
    epoch = max(int(now * 1000), earlier + 1)
    fresh = path.with_suffix(".new")
    fresh.write_text(str(epoch))
    fresh.replace(path)
    return epoch
