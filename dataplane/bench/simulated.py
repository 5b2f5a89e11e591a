"""The real scheduler over a machine that is simulated: time is a number, and nobody waits for it.

Layer: service. The policy under test is `dataplane.scheduling` itself, with its own queue and KV manager; only the
forward pass is replaced, by what it would take. A token's value matters to nobody here, except that no two outputs
begin the same prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dataplane.bench.stepcost import OPT_13B_A100, StepCost, StepWork
from dataplane.errors import IntegrityError
from dataplane.memory.manager import KVManager
from dataplane.protocol import FinishReason, RequestOutput
from dataplane.request import Request
from dataplane.scheduling.capacity import Reserve
from dataplane.scheduling.config import SchedulerConfig
from dataplane.scheduling.plan import Plan, StepResult, StepSeconds
from dataplane.scheduling.scheduler import Scheduler

SAMPLED = 8
"""The use of the pool is looked at once in so many steps."""
FIRST_OUTPUT = 1 << 31
LAST_OUTPUT = (1 << 32) - 1
"""Token ids of outputs; those of prompts are below."""


class SimulatedHandle:
    """A step that is done already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class SimulatedExecutor:
    """Samples a token for whoever a plan says, in the time that `cost` says."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.prefill_ms = 0.0
        """Prefill work since the start, as the profile charges it alone."""
        self._token = FIRST_OUTPUT

    def submit(self, plan: Plan) -> SimulatedHandle:
        work = StepWork.of(plan)
        self.prefill_ms += self.cost.prefill_ms(work)
        token = self._token
        tokens = {request_id: [token + index] for index, request_id in enumerate(plan.samples)}
        self._token = token + len(tokens) if token + 2 * len(tokens) < LAST_OUTPUT else FIRST_OUTPUT
        return SimulatedHandle(StepResult(tokens, seconds=StepSeconds(forward=self.cost.seconds(work))))


@dataclass(slots=True)
class Outcome:
    """What a simulated run came to. Times are simulated seconds."""

    seconds: float = 0.0
    """From the first arrival to the last token."""
    finished: int = 0
    output_tokens: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    """Tokens of prefill that were computed, those of preempted requests again."""
    prefill_s: float = 0.0
    """Prefill work by the profile, as if nothing ran beside it."""
    ttft: array[float] = field(default_factory=lambda: array("d"))
    itl: array[float] = field(default_factory=lambda: array("d"))
    """Gaps between tokens of one request."""
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    used_slots: float = 0.0
    """Slot-seconds that held tokens, of those sampled; `slots` are those that were allocated."""
    slots: float = 0.0
    batch: float = 0.0
    """Request-seconds of those that ran."""

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def useful_share(self) -> float:
        """Share of the allocated KV slots that held tokens."""
        return self.used_slots / self.slots if self.slots else 0.0

    @property
    def mean_batch(self) -> float:
        """Requests that ran, on average over time."""
        return self.batch / self.seconds if self.seconds else 0.0

    @property
    def hit_share(self) -> float:
        """Share of the prompts' tokens that the prefix cache held."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


Watch = Callable[[Scheduler, Plan, list[RequestOutput], float], None]
"""Called after each step, with the moment of its end."""


def simulate(
    requests: Iterable[Request],
    config: SchedulerConfig,
    kv: KVManager,
    *,
    cost: StepCost = OPT_13B_A100,
    reserve: Reserve | None = None,
    watch: Watch | None = None,
    make: Callable[..., Scheduler] = Scheduler,
) -> Outcome:
    """Run `requests`, in the order of their arrival (`queued`), to their end; they are drawn one ahead.

    Raises IntegrityError when the scheduler stalls, loses a request or leaves a block held, and RequestError for a
    request that can never run.
    """
    scheduler = make(config, kv, reserve=reserve)
    executor, outcome = SimulatedExecutor(cost), Outcome()
    arrivals = iter(requests)
    coming = next(arrivals, None)
    began = now = coming.queued if coming is not None else 0.0
    last: dict[str, float] = {}
    added = 0
    while coming is not None or scheduler.has_work():
        while coming is not None and coming.queued <= now:
            scheduler.add(coming)
            added += 1
            coming = next(arrivals, None)
        plan = scheduler.plan(now)
        if not plan.tokens:
            now = _next_moment(now, scheduler, coming)
            continue
        result = executor.submit(plan).result()
        seconds = result.seconds.total
        if outcome.steps % SAMPLED == 0:
            slots = seconds * kv.pool.used * kv.block_size
            outcome.slots += slots
            outcome.used_slots += slots - seconds * kv.empty_slots
        outcome.steps += 1
        outcome.prefill_tokens += plan.prefill_tokens
        outcome.batch += seconds * len(scheduler.running)
        now += seconds
        outputs = scheduler.commit(plan, result, now)
        _measure(outcome, outputs, last, now)
        if watch is not None:
            watch(scheduler, plan, outputs, now)
    outcome.seconds = now - began
    outcome.prefill_s = executor.prefill_ms / 1000
    _close(outcome, scheduler, added)
    return outcome


def _next_moment(now: float, scheduler: Scheduler, coming: Request | None) -> float:
    """When something may happen though nobody runs now."""
    moments = [] if coming is None else [coming.queued]
    wakes = scheduler.wakes_at()
    if wakes is not None:
        moments.append(wakes)
    if not moments or min(moments) < now:
        raise IntegrityError(f"the scheduler has {scheduler.queued} requests waiting and plans nothing")
    return min(moments)


def _measure(outcome: Outcome, outputs: list[RequestOutput], last: dict[str, float], now: float) -> None:
    for output in outputs:
        request_id = output.request_id
        before = last.get(request_id)
        if before is not None:
            outcome.itl.append(now - before)
        elif output.timing is not None:
            outcome.ttft.append(now - output.timing.queued)
        last[request_id] = now
        if output.finish is not None:
            if output.finish is not FinishReason.LENGTH:
                raise IntegrityError(f"request {request_id} ended with {output.finish}: {output.error}")
            del last[request_id]
            outcome.finished += 1


def _close(outcome: Outcome, scheduler: Scheduler, added: int) -> None:
    """Take the scheduler's own counts, and check that nothing is left."""
    scheduler.check_integrity()
    if outcome.finished != added or scheduler.kv.pool.used:
        raise IntegrityError(
            f"{added} requests came, {outcome.finished} ended, {scheduler.kv.pool.used} blocks are held at the end"
        )
    accounts = scheduler.accounts
    outcome.output_tokens = accounts.scheduling.output_tokens
    outcome.preemptions = sum(accounts.scheduling.preemptions.values())
    outcome.prefix_queries, outcome.prefix_hits = accounts.memory.prefix_queries, accounts.memory.prefix_hits
