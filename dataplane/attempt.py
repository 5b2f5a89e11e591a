"""One attempt at a request inside the replica: its sequences, its text, its timings and its cost.

Layer: service. Everything that must not depend on how fast the client reads happens here, the moment an
output arrives: text, stop strings, histograms, the usage record. What waits for the client is text, bounded
by the tokens the request asked for, so a slow client delays nobody. No HTTP and no I/O here.

An attempt that got at least one sequence into the core makes exactly one usage record, when its last sequence
has ended, whatever the end. What it counts:
- output tokens: those the engine produced; behind a stop string only those up to it, as the client is told
- prompt tokens: of sequences that were scheduled; a sequence dropped from the queue cost nothing. Further samples
  of a prompt have none: it is computed once
- basis `engine` when the core itself ended every sequence, `counted` when the core died and the front's own
  count of what came out is all there is
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from dataplane.caller import Caller
from dataplane.logprob_trail import LogprobTrail, Placed
from dataplane.protocol import (
    FinishReason,
    Histogram,
    RequestOutput,
    ServiceCounters,
    Timing,
    TokenLogprob,
    UsageBasis,
    UsageRecord,
)

logger = logging.getLogger(__name__)

_WORST_FIRST = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


class Detokenizer(Protocol):
    """What a choice needs of `dataplane.detokenizer.IncrementalDetokenizer`."""

    @property
    def stopped(self) -> str | None: ...

    @property
    def position(self) -> int: ...

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Host(Protocol):
    """What an attempt needs of its replica."""

    def monotonic(self) -> float:
        """Seconds on the front's monotonic clock."""
        ...

    def wall(self) -> float:
        """Unix seconds."""
        ...

    def service(self) -> ServiceCounters:
        """The open window's service counters, to add to right now."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Free sequences in the core."""
        ...

    def ended(self, attempt: Attempt) -> None:
        """The attempt's last sequence has ended."""
        ...


class Choice:
    """One sequence of an attempt."""

    def __init__(
        self,
        attempt: Attempt,
        index: int,
        request_id: str,
        prompt: Sequence[int],
        text: Detokenizer,
        *,
        source: Choice | None = None,
        logprobs: bool = False,
    ) -> None:
        """`source` is the first sample of the same prompt, for those after it. `logprobs`: they were asked for."""
        self._attempt = attempt
        self._text = text
        self._given = 0
        self._trail = LogprobTrail() if logprobs else None
        self._unread: list[str] = []
        self._came = False
        self._first_at: float | None = None
        self._last_at = 0.0
        self._timing: Timing | None = None
        self.index = index
        self.request_id = request_id
        self.prompt = prompt
        self.source = source or self
        self.prompt_tokens = len(prompt) if source is None else 0
        self.prompt_logprobs: list[TokenLogprob | None] = []
        """Of the first sample alone, once its first output has come."""
        self.cached_tokens = 0
        self.output_tokens = 0
        self.kv_block_seconds = 0.0
        self.device_seconds = 0.0
        self.finish: FinishReason | None = None
        """Why the text ended; set before the core's last output when a stop string was found."""
        self.error = ""
        self.error_code: str | None = None
        """OpenAI's code of an error that lies in the request, and not in the engine."""
        self.error_param: str | None = None
        self.ended = False
        """The core has let go of the sequence."""

    @property
    def started(self) -> bool:
        """The first token has come, whether or not it shows any text yet."""
        return self._first_at is not None

    @property
    def scheduled(self) -> bool:
        return self.started or (self._timing is not None and self._timing.scheduled is not None)

    @property
    def counted_by_engine(self) -> bool:
        return self._timing is not None

    def read(self) -> str | None:
        """Take the text that has come since the last call: None without a new token, empty when new tokens show
        nothing yet (part of a character, or what may begin a stop string)."""
        if not (self._unread or self._came):
            return None
        text = "".join(self._unread)
        self._unread.clear()
        self._came = False
        return text

    def read_logprobs(self) -> list[Placed]:
        """Take the log-probabilities that belong to the text read so far."""
        return [] if self._trail is None else self._trail.read()

    @property
    def mean_logprob(self) -> float:
        """The log-probability per token of everything that was generated: what OpenAI's `best_of` chooses by."""
        return 0.0 if self._trail is None else self._trail.total / max(1, self.output_tokens)

    def take(self, output: RequestOutput) -> None:
        """An output from the core. Never raises: a defect in the text path ends this sequence alone."""
        host = self._attempt.host
        if self.source is self:
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
            self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        try:
            if self.finish is None:
                if output.token_ids:
                    self._count(len(output.token_ids), host.monotonic())
                self._append(output)
        except Exception:
            logger.exception("the text of request %s cannot be made", self.request_id)
            self.finish, self.error = FinishReason.ERROR, "the generated tokens cannot be turned into text"
        if output.finish is not None:
            self._end(output, host)
        elif self.finish is not None:
            host.abort([self.request_id])
        self._attempt.changed.set()

    def _count(self, tokens: int, now: float) -> None:
        service = self._attempt.host.service()
        if self._first_at is None:
            self._first_at = self._last_at = now
            service.ttft = _record(service.ttft, now - self._attempt.accepted)
            later = tokens - 1
        else:
            later = tokens
        if later:
            # Token-weighted: k tokens that came together share the gap before them.
            service.itl = _record(service.itl, (now - self._last_at) / later, later)
            self._last_at = now
        self.output_tokens += tokens
        self._came = True

    def _append(self, output: RequestOutput) -> None:
        # A token that ended the request by its id has no text.
        shown = output.token_ids[:-1] if output.finish is FinishReason.STOP else output.token_ids
        text = self._text.push(shown) if self._trail is None else self._pushed(self._trail, shown, output.logprobs)
        if output.finish is not None:
            text += self._text.flush()
        stopped = self._text.stopped is not None
        if stopped:
            self.finish = FinishReason.STOP
        if text:
            self._unread.append(text)
        self._given += len(text)
        if self._trail is not None:
            self._trail.release(self._given if stopped or output.finish is None else None)

    def _pushed(self, trail: LogprobTrail, tokens: Sequence[int], entries: Sequence[TokenLogprob]) -> str:
        """One token at a time, to know where in the text each begins."""
        trail.count(entries)
        text = ""
        for token, entry in zip(tokens, entries[: len(tokens)], strict=True):
            trail.add(entry, self._text.position)
            text += self._text.push([token])
        return text

    def _end(self, output: RequestOutput, host: Host) -> None:
        self.ended = True
        self._timing = output.timing
        self.kv_block_seconds = output.kv_block_seconds
        self.device_seconds = output.device_seconds
        if self.finish is None:
            self.finish = output.finish
            self.error, self.error_code, self.error_param = output.error or "", output.error_code, output.error_param
        self._observe(host.service(), host.monotonic())
        self._attempt.choice_ended()

    def _observe(self, service: ServiceCounters, now: float) -> None:
        """The histograms of a whole request. Stretches inside the core are on the core's clock alone."""
        reason = str(self.finish)
        service.finished[reason] = service.finished.get(reason, 0) + 1
        service.e2e = _record(service.e2e, now - self._attempt.accepted)
        timing = self._timing
        if timing is None:
            return
        if timing.scheduled is not None:
            service.queue = _record(service.queue, timing.scheduled - timing.queued)
        if timing.scheduled is not None and timing.first_token is not None:
            service.prefill = _record(service.prefill, timing.first_token - timing.scheduled)
        if timing.first_token is not None and timing.last_token is not None and self.output_tokens > 1:
            decode = timing.last_token - timing.first_token
            service.decode = _record(service.decode, decode)
            service.tpot = _record(service.tpot, decode / (self.output_tokens - 1))


class Attempt:
    """All sequences of one HTTP request. `changed` is set whenever there is something to read."""

    def __init__(self, caller: Caller, host: Host, *, accepted: float, model: str) -> None:
        """`accepted` is when the request arrived, on the front's monotonic clock."""
        self.caller = caller
        self.host = host
        self.model = model
        self.accepted = accepted
        self.started_at = host.wall() - max(0.0, host.monotonic() - accepted)
        self.changed = asyncio.Event()
        self.choices: list[Choice] = []

    @property
    def ended(self) -> bool:
        """The core has let go of every sequence."""
        return all(choice.ended for choice in self.choices)

    @property
    def finished(self) -> bool:
        """All text there will be has come."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def failure(self) -> Choice | None:
        """A sequence that ended without an answer, if any."""
        bad = (FinishReason.ERROR, FinishReason.ABORT)
        return next((choice for choice in self.choices if choice.finish in bad), None)

    @property
    def prompt_tokens(self) -> int:
        return sum(choice.prompt_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(choice.cached_tokens for choice in self.choices)

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)

    def cancel(self) -> None:
        """Nobody wants the rest: free it in the core now. Harmless at any time."""
        running = [choice.request_id for choice in self.choices if not choice.ended]
        if running:
            self.host.abort(running)

    def choice_ended(self) -> None:
        """Told by a choice; the last one ends the attempt."""
        if self.ended:
            self.host.ended(self)

    def usage_record(self, *, pool: str, replica: str, boot_epoch: int) -> UsageRecord:
        """What the attempt cost, once it has ended."""
        reasons = {choice.finish for choice in self.choices}
        scheduled = [choice for choice in self.choices if choice.scheduled]
        whole = all(choice.counted_by_engine for choice in self.choices)
        now = self.host.wall()
        return UsageRecord(
            attempt_id=self.caller.attempt_id,
            request_id=self.caller.request_id,
            tenant=self.caller.tenant,
            project=self.caller.project,
            key_id=self.caller.key_id,
            pool=pool,
            model=self.model,
            replica=replica,
            started_at=min(self.caller.arrived_at or self.started_at, now),
            finished_at=now,
            finish=str(next(reason for reason in _WORST_FIRST if reason in reasons)),
            basis=UsageBasis.ENGINE if whole else UsageBasis.COUNTED,
            prompt_tokens=sum(choice.prompt_tokens for choice in scheduled),
            cached_tokens=sum(choice.cached_tokens for choice in scheduled),
            output_tokens=self.output_tokens,
            kv_block_seconds=sum(choice.kv_block_seconds for choice in self.choices),
            device_seconds=sum(choice.device_seconds for choice in self.choices),
            boot_epoch=boot_epoch,
        )


def _record(histogram: Histogram | None, seconds: float, n: int = 1) -> Histogram:
    histogram = histogram or Histogram()
    histogram.record(max(0.0, seconds), n)
    return histogram
