"""What scheduling itself takes, and whether it grows or leaks.

Layer: service. CPU time of this process, which other processes disturb less than the clock; what the machine does
between a plan and its commit is left out. A step with history has as many requests running as one without, so that the
ratio of the two is 1 if nothing that is over is looked at again. The soak is a pool that is too small for what runs:
requests are preempted and computed again all the time, and at the end every block must be free.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dataplane.bench.report import Table
from dataplane.bench.scheduling.case import BLOCK, MANY, SchedulerCase, Section
from dataplane.bench.simulated import SimulatedExecutor, simulate
from dataplane.bench.traces import Traces
from dataplane.bench.workload import percentile, request_of
from dataplane.errors import IntegrityError
from dataplane.hardware.device import resident_memory
from dataplane.memory.manager import KVManager
from dataplane.protocol import RequestOutput
from dataplane.scheduling.config import Preemption, QueueOrder, SchedulerConfig
from dataplane.scheduling.plan import Plan
from dataplane.scheduling.scheduler import Scheduler

RUNNING = 256
PROMPT = 320
"""Above 256, up to which Python has its integers ready: they would flatter a short prompt."""
LONG = 4096
"""What a request has behind it should cost nothing either."""
MEASURED = 200
"""Steps of each measurement."""
TINY_BLOCKS, TINY_SIZE = 33, 4
"""The soak's pool: 32 blocks of 4 tokens."""
SPACING_S = 0.1
"""Between two arrivals of the soak."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """CPU milliseconds of scheduling a step: medians over `steps`, and the 99th percentile of the sum."""

    plan_ms: float
    commit_ms: float
    total_ms: float
    total_p99_ms: float
    steps: int
    history: int
    """Requests that ended before."""
    prompt: int


class Decoding:
    """A scheduler in which `running` requests decode and nothing else happens, with a prefix cache as it is served."""

    def __init__(self, case: SchedulerCase, *, running: int = RUNNING, prompt: int = PROMPT) -> None:
        longest = prompt + BLOCK
        config = SchedulerConfig(
            max_num_seqs=running, max_num_batched_tokens=running * longest, max_waiting=MANY, order=QueueOrder.FCFS
        )
        blocks = running * ((longest + MEASURED) // BLOCK + 2)
        self.scheduler = Scheduler(config, KVManager(blocks, BLOCK))
        self.history = 0
        self._running, self._prompt = running, prompt
        self._executor = SimulatedExecutor(case.cost)
        self._random = random.Random(case.seed)  # noqa: S311 - a workload is no secret
        self._now = 0.0

    def fill(self, output: int) -> None:
        """Start the requests, of `output` tokens each, and compute their prompts."""
        for number in range(self._running):
            # Their blocks fill at different steps, as they do when requests come one by one.
            prompt = [self._random.randrange(1 << 15) for _ in range(self._prompt + number % BLOCK)]
            self.scheduler.add(request_of(f"{self.history}-{number}", prompt, output, self._now))
        self.step()

    def step(self) -> tuple[float, float]:
        """One step: CPU seconds of its plan and of its commit."""
        started = time.process_time()
        plan = self.scheduler.plan(self._now)
        planned = time.process_time()
        result = self._executor.submit(plan).result()
        self._now += result.seconds.total
        executed = time.process_time()
        self.scheduler.commit(plan, result, self._now)
        return planned - started, time.process_time() - executed

    def drain(self) -> None:
        """Let everybody end."""
        while self.scheduler.has_work():
            self.step()
        self.history += self._running

    def times(self, steps: list[tuple[float, float]]) -> StepTimes:
        totals = [plan + commit for plan, commit in steps]
        return StepTimes(
            plan_ms=1000 * percentile([plan for plan, _ in steps], 0.5),
            commit_ms=1000 * percentile([commit for _, commit in steps], 0.5),
            total_ms=1000 * percentile(totals, 0.5),
            total_p99_ms=1000 * percentile(totals, 0.99),
            steps=len(steps),
            history=self.history,
            prompt=self._prompt,
        )


def measure(several: Sequence[Decoding]) -> list[StepTimes]:
    """`MEASURED` steps of each, taken in turns, so that whatever else the machine does meets all of them.

    What was there before is out of the garbage collector's sight, as in the core that serves.
    """
    gc.collect()
    gc.freeze()
    for each in several:
        each.fill(MEASURED + 1)
    steps: list[list[tuple[float, float]]] = [[] for _ in several]
    for _ in range(MEASURED):
        for each, found in zip(several, steps, strict=True):
            found.append(each.step())
    gc.unfreeze()
    return [each.times(found) for each, found in zip(several, steps, strict=True)]


@dataclass(frozen=True, slots=True)
class Soak:
    """`rss_*` are bytes of this process after a tenth of the requests, after half and at the end; by then `kept` bytes
    among them are the latencies that the run measured.
    """

    requests: int
    preemptions: int
    steps: int
    free_blocks: int
    usable_blocks: int
    rss_tenth: int
    rss_half: int
    rss_end: int
    kept: int
    cpu_s: float


def soak(case: SchedulerCase, count: int, how: Preemption) -> Soak:
    """`count` requests through a tiny pool. Raises IntegrityError when a block, a request or an invariant is lost."""
    randomness = random.Random(case.seed)  # noqa: S311 - a workload is no secret
    kv = KVManager(TINY_BLOCKS, TINY_SIZE, host_blocks=TINY_BLOCKS if how is Preemption.SWAP else 0)
    config = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=32, watermark=0.0, max_waiting=MANY, preemption=how
    )
    seen: list[int] = []
    finished = 0

    def watch(scheduler: Scheduler, plan: Plan, outputs: list[RequestOutput], now: float) -> None:
        nonlocal finished
        finished += sum(1 for output in outputs if output.finish is not None)
        if finished >= (count // 10, count // 2, count + 1)[len(seen)]:
            scheduler.check_integrity()
            seen.append(resident_memory())

    requests = (
        request_of(
            str(number),
            [randomness.randrange(4) for _ in range(randomness.randint(1, 40))],
            randomness.randint(1, 24),
            # Near what the pool can serve, so that few wait: a queue that grows would be memory too.
            number * SPACING_S,
            f"tenant-{randomness.randrange(5)}",
        )
        for number in range(count)
    )
    started = time.process_time()
    outcome = simulate(requests, config, kv, cost=case.cost, watch=watch)
    kv.check_integrity()
    if len(kv.pool.free) != kv.pool.usable:
        raise IntegrityError(f"{kv.pool.usable - len(kv.pool.free)} blocks are not free after the soak")
    return Soak(
        requests=outcome.finished,
        preemptions=outcome.preemptions,
        steps=outcome.steps,
        free_blocks=len(kv.pool.free),
        usable_blocks=kv.pool.usable,
        rss_tenth=seen[0],
        rss_half=seen[1],
        rss_end=resident_memory(),
        kept=sum(len(times) * times.itemsize for times in (outcome.ttft, outcome.itl)),
        cpu_s=time.process_time() - started,
    )


def overhead(case: SchedulerCase, traces: Traces) -> Section:
    """Results: `steps` → "alone", "fresh", "history" and "long" → StepTimes, `growth` of the latter two against "fresh"
    (ratio of medians), and `soak` → "recompute" and "swap" → Soak.

    "alone" is the only scheduler of its process, as one that serves is. The other three take turns, and what each of
    them left in the processor's caches is gone when its turn comes again.
    """
    (alone,) = measure((Decoding(case),))
    old = Decoding(case)
    while old.history < case.size(10_000, 1_000):
        old.fill(2)
        old.drain()
    fresh, history, long = measure((Decoding(case), old, Decoding(case, prompt=LONG)))
    soaks = {how.value: soak(case, case.size(10_000, 1_000), how) for how in (Preemption.RECOMPUTE, Preemption.SWAP)}
    steps = Table(
        f"Scheduling a step of {RUNNING} decoding requests (CPU time, median of {MEASURED} steps)",
        ("measured", "ended before", "prompt tokens", "plan ms", "commit ms", "sum ms", "sum p99 ms", "growth"),
        tuple(
            (
                how,
                f"{each.history:,}",
                f"{each.prompt:,}",
                f"{each.plan_ms:.2f}",
                f"{each.commit_ms:.2f}",
                f"{each.total_ms:.2f}",
                f"{each.total_p99_ms:.2f}",
                growth,
            )
            for how, each, growth in (
                ("alone", alone, ""),
                *(("in turns", each, f"{each.total_ms / fresh.total_ms:.2f}") for each in (fresh, history, long)),
            )
        ),
        "What is over and what is computed should cost nothing: the growth should be 1. Other load on the "
        "machine spoils the milliseconds, the growth less so.",
    )
    return Section(
        [steps, _soak_table(soaks)],
        {
            "steps": {
                "alone": asdict(alone),
                "fresh": asdict(fresh),
                "history": asdict(history),
                "long": asdict(long),
            },
            "growth": {"history": history.total_ms / fresh.total_ms, "long": long.total_ms / fresh.total_ms},
            "soak": {how: asdict(found) for how, found in soaks.items()},
        },
    )


def _soak_table(soaks: dict[str, Soak]) -> Table:
    usable = TINY_BLOCKS - 1
    return Table(
        f"Soak through {usable} blocks of {TINY_SIZE} tokens",
        (
            "preemption by",
            "requests",
            "steps",
            "preemptions",
            "free blocks",
            "RSS MB at 10 %",
            "at 50 %",
            "at the end",
            "CPU s",
        ),
        tuple(
            (
                how,
                f"{found.requests:,}",
                f"{found.steps:,}",
                f"{found.preemptions:,}",
                f"{found.free_blocks} of {found.usable_blocks}",
                f"{found.rss_tenth / 1e6:.1f}",
                f"{found.rss_half / 1e6:.1f}",
                f"{found.rss_end / 1e6:.1f}",
                f"{found.cpu_s:.0f}",
            )
            for how, found in soaks.items()
        ),
        "Every invariant of scheduler and memory is checked at each of these moments.",
    )
