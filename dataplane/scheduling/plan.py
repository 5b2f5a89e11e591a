"""The contract between scheduler and executor: plain data, and two small protocols.

Layer: scheduling. `plan(now) → Plan`, `submit(plan) → Handle`, `commit(plan, result) → outputs`. A plan holds
no reference to the scheduler's own objects: it may travel to another process or wait a step in a queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from dataplane.protocol import SamplingParams, TokenLogprob
from dataplane.request import RequestError


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the executor does not hold (first time, or again after a preemption): everything about it.

    `tokens` holds prompt and output so far, `blocks` the whole table, `computed` the tokens whose KV is there
    before this step. `stop_ids` are held back by the sampler until `min_tokens` are out. With `parent`, it is a fork:
    it has no tokens in this step, and its first token is drawn from the row of logits that the parent's is drawn from.
    """

    request_id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    blocks: list[int]
    computed: int
    parent: str = ""


Moves = tuple[tuple[int, int], ...]
"""Blocks to copy, as (from, to) pairs."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Whole KV blocks to move before a step, in this order: out to host memory, in from it, copied on the device.

    `swap_out` is (device block, host block), `swap_in` (host block, device block), `copies` (device, device).
    """

    swap_out: Moves = ()
    swap_in: Moves = ()
    copies: Moves = ()

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)


@dataclass(frozen=True, slots=True)
class RemoteLoad:
    """KV that a connector is to load into whole blocks of a request, whose contents have the hashes `keys`."""

    request_id: str
    blocks: tuple[int, ...]
    keys: tuple[bytes, ...]


class RunningRequest(msgspec.Struct, frozen=True, gc=False):
    """A request the executor holds: blocks appended to its table, tokens computed so far.

    Who only decodes on, one token after those that the executor computed, is in the plan's `tokens` and not here.
    `replaced` is (index, block id): an entry the table already had, now the request's own copy of what was shared.
    """

    request_id: str
    new_blocks: list[int]
    computed: int
    replaced: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: who runs, with how many tokens (`tokens`), who yields a token (`samples`), who is dropped.

    The order of `tokens` is the order of scheduling. `prefill_tokens` are those that are not decode.
    `scrub` names blocks to be cleared before all else: what they hold is not to be trusted; then come `transfers`, and
    then `loads` may begin: what they write over has been moved. Nobody in the step reads their blocks.
    `pairs` and `context` size the attention of the step: (query, key) pairs, and keys read.
    """

    step: int
    tokens: dict[str, int]
    samples: frozenset[str]
    new: tuple[NewRequest, ...] = ()
    running: tuple[RunningRequest, ...] = ()
    dropped: tuple[str, ...] = ()
    scrub: tuple[int, ...] = ()
    transfers: Transfers = Transfers()
    loads: tuple[RemoteLoad, ...] = ()
    prefill_tokens: int = 0
    pairs: int = 0
    context: int = 0

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def told(self) -> bool:
        """Whether the executor must hear of this plan though nobody runs in it."""
        return bool(self.dropped or self.scrub or self.transfers or self.loads)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Where the executor's time went."""

    prepare: float = 0.0
    launch: float = 0.0
    forward: float = 0.0
    sync: float = 0.0
    sample: float = 0.0

    @property
    def total(self) -> float:
        return self.prepare + self.launch + self.forward + self.sync + self.sample


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens sampled, by request; `errors` names requests whose result is unusable, with the reason."""

    tokens: dict[str, list[int]]
    errors: dict[str, str] = field(default_factory=dict)
    seconds: StepSeconds = StepSeconds()
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob | None]] = field(default_factory=dict)
    """By request, for the prompt positions whose logits this step computed, in order of position."""
    refusals: dict[str, RequestError] = field(default_factory=dict)
    """Of those in `errors`, the requests that are themselves at fault: they would fail elsewhere too."""


class Handle(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait for the step and return what it made."""


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    def submit(self, plan: Plan) -> Handle:
        """Start a step. The plan is not kept."""
