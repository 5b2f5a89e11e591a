"""Wire structs shared by the engine and the control plane.

Layer: service. This module owns every message that crosses a process boundary: front ↔ core
(msgpack over ZMQ) and replica or gateway → control plane (msgpack over HTTP). It imports neither torch
nor any I/O; it is the one module of `dataplane` that `controlplane` imports freely.

Fields may be added with a default; a field is never renamed, retyped or removed without a new
`SCHEMA_VERSION`. Times called `*_at` are Unix seconds; durations are seconds; sizes are bytes or tokens
as named.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec

from dataplane.counters import AlgorithmCounters as AlgorithmCounters
from dataplane.counters import Collective as Collective
from dataplane.counters import Counters as Counters
from dataplane.counters import MemoryCounters as MemoryCounters
from dataplane.counters import ParallelismCounters as ParallelismCounters
from dataplane.counters import ProposerCounters as ProposerCounters
from dataplane.counters import RuntimeCounters as RuntimeCounters
from dataplane.counters import SchedulingCounters as SchedulingCounters
from dataplane.counters import ServiceCounters as ServiceCounters
from dataplane.counters import TenantService as TenantService
from dataplane.gateway_report import LATEST_REFUSED as LATEST_REFUSED
from dataplane.gateway_report import GatewayCounters as GatewayCounters
from dataplane.gateway_report import GatewayRefusals as GatewayRefusals
from dataplane.gateway_report import GatewayReport as GatewayReport
from dataplane.gateway_report import GatewaySeries as GatewaySeries
from dataplane.gateway_report import GatewayWindow as GatewayWindow
from dataplane.gateway_report import RefusedRequest as RefusedRequest
from dataplane.kv_events import AllBlocksCleared as AllBlocksCleared
from dataplane.kv_events import BlockRemoved as BlockRemoved
from dataplane.kv_events import BlockStored as BlockStored
from dataplane.kv_events import KVEventBatch as KVEventBatch
from dataplane.message import SCHEMA_VERSION as SCHEMA_VERSION
from dataplane.message import Message as Message
from dataplane.tally import Histogram as Histogram
from dataplane.tally import Tally as Tally

WINDOW_SECONDS = 10


class Layer(enum.StrEnum):
    """The seven layers; every refusal, preemption, alert and metric names one."""

    SERVICE = "service"
    SCHEDULING = "scheduling"
    MEMORY = "memory"
    ALGORITHM = "algorithm"
    RUNTIME = "runtime"
    PARALLELISM = "parallelism"
    HARDWARE = "hardware"


class FinishReason(enum.StrEnum):
    """Why a request ended, as the engine saw it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class UsageBasis(enum.StrEnum):
    """Where a usage number comes from: the engine's own count, the front's count of what it delivered, an estimate."""

    ENGINE = "engine"
    COUNTED = "counted"
    ESTIMATED = "estimated"


# --------------------------------------------------------------------------------------------------------------
# Front ↔ core
# --------------------------------------------------------------------------------------------------------------


class GrammarKind(enum.StrEnum):
    """What a constraint on the output is written in."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


class Grammar(Message, frozen=True, kw_only=True):
    """The language the output must be in. `text` is the schema (JSON), the expression, the grammar, or a JSON list of
    choices; empty for `json_object`."""

    kind: GrammarKind
    text: str = ""


class SamplingParams(Message, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. Ranges are checked by `dataplane.request.validate_params`.

    `temperature` 0 is greedy; `top_k` 0 keeps all; `max_tokens` None means up to the context limit.
    `repetition_penalty` divides positive and multiplies negative logits of tokens already seen (CTRL);
    presence and frequency penalties subtract, over output tokens only (OpenAI).
    `logprobs` asks for the log-probability of each output token and of the k likeliest beside it (0: of none beside
    it); `prompt_logprobs` likewise for the prompt. They are those of the model, before any change to its logits.
    `logit_bias` is added to the logits of its token ids; `bad_words` are token sequences that may not be completed.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


class EngineRequest(Message, frozen=True, kw_only=True):
    """One sequence for the engine core. `tenant` and `fair_tag` come from the gateway, never from the client.

    `forks` names further samples of the same prompt: each is a request of its own id once the prompt is computed, which
    happens once; the k-th draws with seed + k. `read_cache` False computes the whole prompt anew (and still caches it).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrived_at: float
    tenant: str = ""
    priority: int = 0
    fair_tag: float = 0.0
    deadline_at: float | None = None
    cache_salt: str = ""
    adapter: str = ""
    forks: tuple[str, ...] = ()
    read_cache: bool = True


class TokenLogprob(Message, frozen=True, kw_only=True):
    """One token's log-probability (natural logarithm), its rank (1 is likeliest), and the likeliest in order."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class Timing(Message, frozen=True, kw_only=True):
    """One request's milestones on the core's monotonic clock, in seconds."""

    queued: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class RequestOutput(Message, frozen=True, kw_only=True, gc=False):
    """What one step produced for one request. `finish` is set exactly once, on the last output.

    What is said of the request itself (`cached_tokens` and all that follows, but for `logprobs`) is there on its first
    output and on its last; those between hold tokens alone.
    """

    request_id: str
    token_ids: list[int] = []
    finish: FinishReason | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    timing: Timing | None = None
    preemptions: int = 0
    kv_block_seconds: float = 0.0
    device_seconds: float = 0.0
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, where they were asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each prompt token but the first, which has None; with the first output only."""
    host_tokens: int = 0
    """How many of `cached_tokens` came back from host memory."""
    error_code: str | None = None
    """OpenAI's code of an `error` that lies in the request, and not in the engine."""
    error_param: str | None = None
    """The parameter at fault, where there is one."""


class AddRequest(Message, tag="add", frozen=True, kw_only=True):
    request: EngineRequest
    boot_epoch: int = 0


class AbortRequests(Message, tag="abort", frozen=True, kw_only=True):
    request_ids: list[str]
    boot_epoch: int = 0


class Shutdown(Message, tag="shutdown", frozen=True, kw_only=True):
    """Ask the core to finish what runs and exit."""

    drain: bool = True
    boot_epoch: int = 0


FrontMessage = AddRequest | AbortRequests | Shutdown


class CoreReady(Message, tag="ready", frozen=True, kw_only=True):
    """The core has loaded its model and accepts requests."""

    boot_epoch: int
    model: str
    max_model_len: int
    block_size: int
    total_blocks: int
    eos_token_ids: list[int] = []
    load_seconds: float = 0.0
    device: str = "cpu"
    attention_backend: str = ""
    forward: str = ""
    """eager or captured: how a step is run."""
    kernel_tier: str = ""
    """The instruction set of the engine's own kernels; empty where it has none in use."""
    weights: str = ""
    """The numbers that matrices are kept in."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    max_num_seqs: int = 0
    """The most sequences that run at once, and so the most samples of one prompt; 0 does not tell."""
    reserves_max: bool = False
    """A request takes the blocks of its longest answer at once, and those of its further samples with them."""


class StepOutput(Message, tag="step", frozen=True, kw_only=True):
    """All outputs of one engine step: one frame a step. `stats` rides along when it changed."""

    boot_epoch: int
    step: int
    outputs: list[RequestOutput] = []
    stats: CoreStats | None = None


class CoreFault(Message, tag="fault", frozen=True, kw_only=True):
    """The core hit an error it cannot go on from; it exits after this frame."""

    boot_epoch: int
    error: str


CoreMessage = CoreReady | StepOutput | CoreFault


# --------------------------------------------------------------------------------------------------------------
# Report: what a replica tells the control plane
# --------------------------------------------------------------------------------------------------------------


class RankMemory(Message, frozen=True, kw_only=True):
    """One rank's memory ledger, in bytes."""

    weights: int = 0
    kv: int = 0
    workspace: int = 0
    fragments: int = 0
    free: int = 0
    total: int = 0


class Gauges(Message, frozen=True, kw_only=True):
    """State at one moment. `kv_slots_empty` counts slots that are allocated and hold no token (internal waste)."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    block_size: int = 0
    kv_slots_empty: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    waiting_for_remote_kv: int = 0
    recent_hit_ratio: float | None = None
    """Share of the prompt tokens of the latest requests that the prefix cache held; None before the first."""
    credits: int = 0
    ranks: list[RankMemory] = []
    device: str = ""
    power_watts: float | None = None
    clock_mhz: float | None = None


class CoreStats(Message, frozen=True, kw_only=True):
    """What the core knows of itself: counters since its boot, and its state now."""

    counters: Counters
    gauges: Gauges


class Window(Message, frozen=True, kw_only=True):
    """What happened within one aligned span of `WINDOW_SECONDS`, complete as far as known.

    A window is sent again, whole and larger, while it grows: the receiver replaces what it holds for
    (instance, boot_epoch, start) if the sequence is newer, so a repeat or a lost acknowledgement never
    counts twice.
    """

    start: int
    counters: Counters = msgspec.field(default_factory=Counters)
    gauge_sums: dict[str, float] = {}
    gauge_max: dict[str, float] = {}
    gauge_samples: int = 0


class UsageRecord(Message, frozen=True, kw_only=True):
    """One attempt's cost, kept by its producer until acknowledged and stored once by `attempt_id`.

    `started_at` is when its request reached the gateway; the replica, when nobody told it.
    """

    attempt_id: str
    request_id: str
    tenant: str
    key_id: str
    pool: str
    model: str
    replica: str
    started_at: float
    finished_at: float
    finish: str
    basis: UsageBasis
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    kv_block_seconds: float = 0.0
    device_seconds: float = 0.0
    project: str = ""
    boot_epoch: int = 0


class ReplicaState(enum.StrEnum):
    """STARTING, READY, DRAINING and FAILED are what a replica says of itself; STALE and LOST are concluded by
    the control plane from silence."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STALE = "stale"
    LOST = "lost"


class Report(Message, frozen=True, kw_only=True):
    """Replica → control plane, about one a second.

    `windows` holds those that changed since the report numbered `acknowledged`; `full` marks a report that
    holds all retained windows (first of a boot, or after a resync was asked for). `usage` holds the oldest
    records not yet acknowledged, `usage_left` is the number of those for which it had no room.
    """

    schema_version: int = SCHEMA_VERSION
    replica: str
    pool: str
    model: str
    url: str
    boot_epoch: int
    core_epoch: int
    sequence: int
    acknowledged: int
    full: bool = False
    sent_at: float
    started_at: float
    state: ReplicaState
    state_reason: str = ""
    core_restarts: int = 0
    policy_epoch: int = 0
    ready: CoreReady | None = None
    gauges: Gauges = Gauges()
    windows: list[Window] = []
    usage: list[UsageRecord] = []
    usage_left: int = 0


class Command(Message, frozen=True, kw_only=True):
    """One instruction to a replica: `drain`, `resume`, `resync`, `profile`."""

    id: str
    kind: str
    args: dict[str, Any] = {}


class ReportAck(Message, frozen=True, kw_only=True):
    """Everything up to `sequence` is stored; `usage_ids` are stored and may be forgotten.

    `refused` names the parts of the report that were set aside with a reason; sending them again changes nothing.
    """

    sequence: int
    usage_ids: list[str] = []
    policy_epoch: int = 0
    commands: list[Command] = []
    refused: list[str] = []


# --------------------------------------------------------------------------------------------------------------
# Gateway → replica headers
# --------------------------------------------------------------------------------------------------------------

COUNT_SUFFIX = "/tokens"
"""Below the address of a generating route: the tokens of its body's prompts, nothing generated."""


class TokenCount(msgspec.Struct, frozen=True):
    """What the counting routes answer, in JSON."""

    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)]
    """Of all prompts together."""
    prompts: Annotated[int, msgspec.Meta(ge=1)] = 1


HEADER_ATTEMPT = "x-tidegate-attempt"
HEADER_TENANT = "x-tidegate-tenant"
HEADER_PROJECT = "x-tidegate-project"
HEADER_KEY = "x-tidegate-key"
HEADER_SALT = "x-tidegate-salt"
HEADER_PRIORITY = "x-tidegate-priority"
HEADER_FAIR_TAG = "x-tidegate-fair-tag"
HEADER_ARRIVED = "x-tidegate-arrived"
"""When the request reached its gateway, Unix seconds: from then its price counts, whoever tells its usage."""
HEADER_USAGE = "x-tidegate-usage"
HEADER_REPLICA = "x-tidegate-replica"
HEADER_REASON = "x-tidegate-reason"
HEADER_REQUEST = "x-request-id"

encode = msgspec.msgpack.Encoder().encode
