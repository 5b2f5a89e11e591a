"""A request inside the engine core: its data, its explicit state machine, and the check of its parameters.

Layer: scheduling. Pure. A request knows where it stands; it never decides what happens next: only the
scheduler moves it, and a move that is not in `MOVES` raises.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dataplane.protocol import EngineRequest, FinishReason, SamplingParams, Timing, TokenLogprob

MAX_SEED = 2**63 - 1
MAX_STOP_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64


class RequestError(Exception):
    """A request that can never run as asked: one sentence, an OpenAI error code and the parameter at fault."""

    def __init__(self, message: str, code: str = "invalid_value", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class InvalidTransitionError(Exception):
    """A request was moved along an edge that its state machine does not have."""


class RequestState(enum.StrEnum):
    """Where a request stands. The four FINISHED states are final."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH = "finished_length"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_ERROR = "finished_error"

    @property
    def finished(self) -> bool:
        return self in FINISH_REASONS


FINISH_REASONS = {
    RequestState.FINISHED_STOPPED: FinishReason.STOP,
    RequestState.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestState.FINISHED_ABORTED: FinishReason.ABORT,
    RequestState.FINISHED_ERROR: FinishReason.ERROR,
}
_LEAVE = frozenset({RequestState.FINISHED_ABORTED, RequestState.FINISHED_ERROR})
MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: _LEAVE | {RequestState.RUNNING, RequestState.WAITING_FOR_REMOTE_KV},
    RequestState.WAITING_FOR_REMOTE_KV: _LEAVE | {RequestState.WAITING},
    RequestState.RUNNING: frozenset(FINISH_REASONS) | {RequestState.PREEMPTED},
    RequestState.PREEMPTED: _LEAVE | {RequestState.RUNNING, RequestState.WAITING_FOR_REMOTE_KV},
}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence and its progress. Owned by the scheduler; nobody else writes to it.

    `tokens` is the prompt and then what was generated. `computed` counts the tokens whose KV exists or is
    being made by a step in flight: what a request wants of a step is `len(tokens) − computed`, whether that
    is a whole prompt, a chunk, a prompt after a prefix hit, or one decode token.
    """

    request_id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    max_tokens: int
    seed: int
    queued: float
    tenant: str = ""
    priority: int = 0
    fair_tag: float = 0.0
    salt: str = ""
    adapter: str = ""
    forks: tuple[str, ...] = ()
    read_cache: bool = True
    deadline: float | None = None
    """When the first token is worth nothing any more, on the core's clock."""
    placeholders: int = 0
    """Output tokens that steps in flight will yield; their values are not known yet."""
    in_flight: int = 0
    """Steps that were planned with this request and whose results are not in."""
    host_cached: int = 0
    found_in_host: int = 0
    found_remotely: int = 0
    """Where the tokens were that its latest start, or the load before it, found: the rest was on the device."""
    state: RequestState = RequestState.WAITING
    computed: int = 0
    cached: int = 0
    served_prompt: int = 0
    preemptions: int = 0
    admission: int = -1
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    kv_block_seconds: float = 0.0
    kv_since: float = 0.0
    device_seconds: float = 0.0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Those of the prompt positions computed so far; they leave with the first output."""
    error: str | None = None
    refusal: RequestError | None = None
    """The `error` once more, when it is the request that cannot go on as asked and not the engine that failed."""

    @classmethod
    def of(cls, wire: EngineRequest, *, now: float, max_model_len: int, seed: int) -> Request:
        """From the wire. `seed` is used where the client gave none; the output limit is cut to the context.

        Log-probabilities of a prompt need all of it to be computed, so such a request reads no cache. A deadline is
        told by the front's clock; what is left of it counts from now on the core's.
        """
        prompt_len = len(wire.prompt_token_ids)
        room = max_model_len - prompt_len
        limit = wire.params.max_tokens
        return cls(
            request_id=wire.request_id,
            tokens=list(wire.prompt_token_ids),
            prompt_len=prompt_len,
            params=wire.params,
            max_tokens=room if limit is None else min(limit, room),
            seed=seed if wire.params.seed is None else wire.params.seed,
            queued=now,
            tenant=wire.tenant,
            priority=wire.priority,
            fair_tag=wire.fair_tag,
            salt=wire.cache_salt,
            adapter=wire.adapter,
            forks=wire.forks,
            read_cache=wire.read_cache and wire.params.prompt_logprobs is None,
            deadline=None if wire.deadline_at is None else now + (wire.deadline_at - wire.arrived_at),
        )

    def fork(self, request_id: str, number: int) -> Request:
        """The `number`-th further sample of this prompt, none of whose tokens is generated yet; seed + number draws."""
        return replace(
            self,
            request_id=request_id,
            tokens=self.tokens[: self.prompt_len],
            seed=(self.seed + number + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1,
            forks=(),
            deadline=None,
            placeholders=0,
            in_flight=0,
            admission=-1,
            preemptions=0,
            block_hashes=[],
            kv_block_seconds=0.0,
            device_seconds=0.0,
            prompt_logprobs=[],
        )

    @property
    def wanted(self) -> int:
        """Tokens whose KV should exist after the next step, those that steps in flight will yield among them."""
        return len(self.tokens) + self.placeholders

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def seats(self) -> int:
        """How many requests this one is, or will be once its prompt is computed. A fork given up before is ""."""
        return 1 + sum(1 for fork in self.forks if fork)

    @property
    def most_tokens(self) -> int:
        """The most tokens whose KV this request will ever hold: the last token it generates needs none."""
        return self.prompt_len + self.max_tokens - 1

    @property
    def timing(self) -> Timing:
        return Timing(
            queued=self.queued, scheduled=self.scheduled, first_token=self.first_token, last_token=self.last_token
        )

    def move(self, state: RequestState) -> None:
        """Go to `state`. Raises InvalidTransitionError when the state machine has no such edge."""
        if state not in MOVES.get(self.state, frozenset()):
            raise InvalidTransitionError(f"request {self.request_id} cannot go from {self.state} to {state}")
        self.state = state


def validate_params(
    params: SamplingParams, *, vocab_size: int, max_model_len: int, prompt_len: int, max_logprobs: int = 20
) -> None:
    """Refuse what can never run. Raises RequestError with the OpenAI code and the parameter's name.

    Ranges are OpenAI's where OpenAI has the parameter (DOMAIN 2.4).
    """
    _within("temperature", params.temperature, 0.0, 2.0)
    _within("top_p", params.top_p, 0.0, 1.0, above=True)
    _within("min_p", params.min_p, 0.0, 1.0)
    _within("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _within("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _within("repetition_penalty", params.repetition_penalty, 0.01, 10.0)
    _within("top_k", params.top_k, 0, math.inf)
    if params.seed is not None:
        _within("seed", params.seed, -MAX_SEED - 1, MAX_SEED)
    if params.max_tokens is not None:
        _within("max_tokens", params.max_tokens, 1, math.inf)
    _within("min_tokens", params.min_tokens, 0, math.inf if params.max_tokens is None else params.max_tokens)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None:
            _within(name, count, 0, max_logprobs)
    _check_stops(params, vocab_size)
    _check_bias(params, vocab_size)
    _check_bad_words(params, vocab_size)
    _check_length(params, max_model_len, prompt_len)


def validate_samples(samples: int, max_num_seqs: int) -> None:
    """Refuse more samples of one prompt than may run at once: they start together. Raises RequestError."""
    if samples > max_num_seqs:
        raise RequestError(
            f"{samples} samples of one prompt are asked for; this engine runs {max_num_seqs} requests at once",
            "invalid_value",
            "n",
        )


def _within(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """`above` excludes the lower bound. NaN is outside every range."""
    if (low < value if above else low <= value) and value <= high:
        return
    bound = "above" if above else "at least"
    upper = "" if high == math.inf else f" and at most {high:g}"
    raise RequestError(f"{name} must be {bound} {low:g}{upper}, got {value!r}", "invalid_value", name)


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if len(params.stop) > MAX_STOP_STRINGS or not all(params.stop):
        raise RequestError(f"stop takes up to {MAX_STOP_STRINGS} strings, none of them empty", "invalid_value", "stop")
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestError(f"stop_token_ids takes up to {MAX_STOP_TOKENS} ids", "invalid_value", "stop_token_ids")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_bias(params: SamplingParams, vocab_size: int) -> None:
    if len(params.logit_bias) > MAX_BIASED_TOKENS:
        raise RequestError(f"logit_bias takes up to {MAX_BIASED_TOKENS} tokens", "invalid_value", "logit_bias")
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for bias in params.logit_bias.values():
        _within("logit_bias", bias, -100.0, 100.0)


def _check_bad_words(params: SamplingParams, vocab_size: int) -> None:
    if len(params.bad_words) > MAX_BAD_WORDS or not all(
        0 < len(word) <= MAX_BAD_WORD_TOKENS for word in params.bad_words
    ):
        raise RequestError(
            f"bad_words takes up to {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_TOKENS} tokens",
            "invalid_value",
            "bad_words",
        )
    for word in params.bad_words:
        _check_ids("bad_words", word, vocab_size)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} holds {token}; the vocabulary has the ids 0 to {vocab_size - 1}", "invalid_value", name
            )


def _check_length(params: SamplingParams, max_model_len: int, prompt_len: int) -> None:
    if prompt_len == 0:
        raise RequestError("the prompt is empty", "invalid_value", "prompt")
    if prompt_len >= max_model_len:
        raise RequestError(
            f"this model's context is {max_model_len} tokens and the prompt has {prompt_len}, "
            "which leaves no room for an answer",
            "context_length_exceeded",
            "prompt",
        )
    if params.max_tokens is not None and prompt_len + params.max_tokens > max_model_len:
        raise RequestError(
            f"this model's context is {max_model_len} tokens; the prompt has {prompt_len} and max_tokens asks for "
            f"{params.max_tokens} more",
            "context_length_exceeded",
            "max_tokens",
        )
    if params.min_tokens > max_model_len - prompt_len:
        raise RequestError(
            f"min_tokens asks for {params.min_tokens} tokens where the context has room for "
            f"{max_model_len - prompt_len}",
            "context_length_exceeded",
            "min_tokens",
        )
