"""What it gains to cut prompts into chunks, and what it costs.

Layer: service. One knob: how many tokens a step may hold. Source: Agrawal et al., Sarathi-Serve (2024). The control is
the total of prefill work, which chunking must not lower: it moves work, it saves none. The losing regime is the time
to the first token, which the same rows show.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dataplane.bench.report import Table
from dataplane.bench.scheduling.case import MANY, SchedulerCase, Section, pool
from dataplane.bench.simulated import Outcome, simulate
from dataplane.bench.traces import TraceMissingError, Traces
from dataplane.bench.workload import Lengths, lengths_of, percentile, poisson, requests_of
from dataplane.request import Request
from dataplane.scheduling.config import SchedulerConfig
from dataplane.scheduling.draft import Draft
from dataplane.scheduling.scheduler import Scheduler

CHUNKS = (256, 512, 1024, 2048)
LONGEST = 4096
"""Prompt and output together, of the requests taken from a trace."""
LOAD = 0.8
"""Arrivals as a share of what prefill-first does when all requests wait; also the smallest chunks keep up with it."""
LOADS = (0.8, 0.9, 1.0, 1.1)
"""How much of the gain is a matter of the load: prompts that arrive together are prefilled one after the other."""
SLOTS = MANY
"""KV slots: more than are ever used, so that steps alone decide. On a smaller pool fewer requests decode at once, fewer
arrive, and what a prompt stalls is less."""


class PrefillFirst(Scheduler):
    """What chunked prefill is measured against, vLLM's order of 2023: while a prompt can be admitted, steps hold
    whole prompts only, and those who decode wait. The budget must hold the longest prompt."""

    def _plan_running(self, draft: Draft, now: float) -> bool:
        self._admit(draft, now)
        return not draft.tokens and super()._plan_running(draft, now)

    def _begin(self, draft: Draft, request: Request, now: float) -> bool:
        return request.wanted <= draft.budget and super()._begin(draft, request, now)


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles in seconds. `prefill_s` is the prefill work as the profile charges it alone."""

    itl_p50: float
    itl_p99: float
    itl_max: float
    ttft_p50: float
    ttft_p99: float
    throughput: float
    """Output tokens per second, with requests arriving."""
    most: float
    """The same with all requests waiting: what the machine can do."""
    prefill_tokens: int
    prefill_s: float
    preemptions: int


def run_chunk(chunk: int | None, lengths: list[Lengths], case: SchedulerCase, rate: float | None) -> Outcome:
    """A token budget of `chunk`, or prefill-first; `rate` requests per second, or all at once."""
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=chunk or LONGEST, max_waiting=MANY)
    arrivals = None if rate is None else poisson(rate, case.seed)
    make = PrefillFirst if chunk is None else Scheduler
    return simulate(requests_of(lengths, arrivals), config, pool(SLOTS), cost=case.cost, make=make)


def latency_of(outcome: Outcome, most: float) -> Latency:
    return Latency(
        itl_p50=percentile(outcome.itl, 0.5),
        itl_p99=percentile(outcome.itl, 0.99),
        itl_max=max(outcome.itl, default=0.0),
        ttft_p50=percentile(outcome.ttft, 0.5),
        ttft_p99=percentile(outcome.ttft, 0.99),
        throughput=outcome.throughput,
        most=most,
        prefill_tokens=outcome.prefill_tokens,
        prefill_s=outcome.prefill_s,
        preemptions=outcome.preemptions,
    )


def chunking(case: SchedulerCase, traces: Traces) -> Section:
    """Results: lengths → {`rate` (requests/s), `steps` → "prefill-first" or chunk → Latency, `loads` → share of
    capacity → "prefill-first" and "512" → Latency}.

    Raises TraceMissingError without either trace.
    """
    section = Section()
    missing = None
    for name, role in (("azure conv", "conv"), ("arxiv", "arxiv")):
        count = case.size(600, 150)
        try:
            lengths = lengths_of(traces.read(role, 2 * count).rows, LONGEST)[:count]
        except TraceMissingError as error:
            missing = error
            continue
        rate, found = frontier(lengths, case, LOAD)
        section.tables.append(_table(name, len(lengths), rate, found))
        steps = {budget: asdict(latency) for budget, latency in found.items()}
        loads = by_load(lengths, case, rate / LOAD)
        section.tables.append(_loads_table(name, loads))
        section.results[name] = {
            "rate": rate,
            "steps": steps,
            "loads": {str(load): {how: asdict(each) for how, each in both.items()} for load, both in loads.items()},
        }
    if missing is not None and not section.tables:
        raise missing
    return section


def frontier(lengths: list[Lengths], case: SchedulerCase, load: float) -> tuple[float, dict[str, Latency]]:
    """Requests/s that arrive, and what each budget makes of them, the largest first."""
    budgets = (None, *reversed(CHUNKS))
    most = {budget: run_chunk(budget, lengths, case, None).throughput for budget in budgets}
    rate = load * most[None] * len(lengths) / sum(output for _, output in lengths)
    return rate, {
        "prefill-first" if budget is None else str(budget): latency_of(
            run_chunk(budget, lengths, case, rate), most[budget]
        )
        for budget in budgets
    }


def by_load(lengths: list[Lengths], case: SchedulerCase, capacity: float) -> dict[float, dict[str, Latency]]:
    """Prefill-first and a budget of 512 at shares of `capacity` (requests/s)."""
    return {
        load: {
            how: latency_of(run_chunk(budget, lengths, case, load * capacity), 0.0)
            for how, budget in (("prefill-first", None), ("512", 512))
        }
        for load in LOADS
    }


def _loads_table(name: str, loads: dict[float, dict[str, Latency]]) -> Table:
    rows = []
    for load, both in loads.items():
        base, chunked = both["prefill-first"], both["512"]
        rows.append(
            (
                f"{load:.0%}",
                f"{1000 * base.itl_p99:.0f} → {1000 * chunked.itl_p99:.0f} ({base.itl_p99 / chunked.itl_p99:.1f}x)",
                f"{1000 * base.itl_max:.0f} → {1000 * chunked.itl_max:.0f} ({base.itl_max / chunked.itl_max:.1f}x)",
                f"{base.ttft_p99:.2f} → {chunked.ttft_p99:.2f}",
            )
        )
    return Table(
        f"Prefill-first → 512 tokens a step, {name} lengths, by load",
        ("load", "ITL p99 ms (gain)", "ITL max ms (gain)", "TTFT p99 s"),
        tuple(rows),
        "The gain grows with the load, and so does its price: above the capacity of the chunked steps the queue grows.",
    )


def _table(name: str, count: int, rate: float, found: dict[str, Latency]) -> Table:
    base = found["prefill-first"]
    rows = tuple(
        (
            budget,
            f"{1000 * each.itl_p50:.0f}",
            f"{1000 * each.itl_p99:.0f} ({base.itl_p99 / each.itl_p99:.1f}x)",
            f"{1000 * each.itl_max:.0f} ({base.itl_max / each.itl_max:.1f}x)",
            f"{each.ttft_p50:.2f}",
            f"{each.ttft_p99:.2f} ({each.ttft_p99 / base.ttft_p99:.2f}x)",
            f"{each.throughput:.1f} ({each.throughput / base.throughput - 1:+.2%})",
            f"{each.most:.0f} ({each.most / base.most - 1:+.1%})",
            f"{each.prefill_tokens:,}",
            f"{each.prefill_s / base.prefill_s:.2f}",
        )
        for budget, each in found.items()
    )
    return Table(
        f"Chunked prefill, {name} lengths (n = {count}, {rate:.2f} requests/s, {LOAD:.0%} of capacity)",
        (
            "tokens a step",
            "ITL p50 ms",
            "ITL p99 (gain)",
            "ITL max (gain)",
            "TTFT p50 s",
            "TTFT p99 (price)",
            "tokens/s",
            "when all wait",
            "prefill tokens",
            "prefill work",
        ),
        rows,
        "Control: the prefill tokens are the same and the work for them is not lower (it rises by the fixed cost of "
        "further steps). Tokens/s are those of the arrivals, and beside them those the machine can do.",
    )
