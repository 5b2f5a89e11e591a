"""What it gains to take KV blocks as tokens come, and not as many as there may ever be.

Layer: service. One knob: how much room an admission takes (`Reserve`), then the block size, then the watermark. Source:
Kwon et al., PagedAttention (2023), figures 2 and 12: Orca (Max) reserves the longest context, Orca (Pow2) the next
power of two of the true output, Orca (Oracle) the true output itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dataplane.bench.report import Table
from dataplane.bench.scheduling.case import A100_40G_SLOTS, BLOCK, CONTEXT, MANY, SchedulerCase, Section, pool
from dataplane.bench.simulated import Outcome, simulate
from dataplane.bench.traces import TraceMissingError, Traces
from dataplane.bench.workload import Lengths, lengths_of, requests_of
from dataplane.request import Request
from dataplane.scheduling.capacity import Reserve
from dataplane.scheduling.config import SchedulerConfig

WATERMARKS = (0.0, 0.01, 0.05, 0.1)


@dataclass(frozen=True, slots=True)
class Policy:
    """How much room a request takes when it begins; without `reserve`, that of its tokens."""

    name: str
    reserve: Reserve | None = None
    block_size: int = BLOCK


def whole_context(request: Request) -> int:
    return CONTEXT


def power_of_two(request: Request) -> int:
    """The prompt, and the output rounded up to a power of two."""
    return request.prompt_len + (1 << (request.max_tokens - 1).bit_length())


def true_length(request: Request) -> int:
    return request.prompt_len + request.max_tokens


POLICIES = (
    Policy("max", whole_context),
    Policy("pow2", power_of_two),
    Policy("oracle", true_length),
    Policy("paged-16"),
    Policy("paged-128", block_size=128),
)


@dataclass(frozen=True, slots=True)
class Use:
    """What one policy came to. `useful` is the share of the allocated slots that held tokens."""

    throughput: float
    useful: float
    mean_batch: float
    preemptions: int
    recomputed: float
    """Prefill tokens for each token of a prompt: above 1, work was done again."""


def run_policy(policy: Policy, lengths: list[Lengths], case: SchedulerCase, watermark: float = 0.01) -> Use:
    """All of `lengths` at once, through one policy."""
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=CONTEXT, watermark=watermark, max_waiting=MANY)
    kv = pool(A100_40G_SLOTS, policy.block_size)
    outcome = simulate(requests_of(lengths), config, kv, cost=case.cost, reserve=policy.reserve)
    return use_of(outcome, sum(prompt for prompt, _ in lengths))


def use_of(outcome: Outcome, prompt_tokens: int) -> Use:
    return Use(
        throughput=outcome.throughput,
        useful=outcome.useful_share,
        mean_batch=outcome.mean_batch,
        preemptions=outcome.preemptions,
        recomputed=outcome.prefill_tokens / prompt_tokens,
    )


def capacity(case: SchedulerCase, traces: Traces) -> Section:
    """Results: `policies` → lengths → policy → Use, `watermarks` → lengths → watermark → Use (paged-16).

    Raises TraceMissingError without either trace.
    """
    workloads = {}
    missing = None
    for name, role in (("vtc", "vtc"), ("azure conv", "conv")):
        try:
            rows = traces.read(role, case.size(3000, 800)).rows
        except TraceMissingError as error:
            missing = error
            continue
        workloads[name] = lengths_of(rows, CONTEXT)[: case.size(1500, 400)]
    if missing is not None and not workloads:
        raise missing
    section = Section(results={"policies": {}, "watermarks": {}})
    for name, lengths in workloads.items():
        uses = {policy.name: run_policy(policy, lengths, case) for policy in POLICIES}
        section.tables.append(_table(name, len(lengths), uses))
        section.results["policies"][name] = {policy: asdict(use) for policy, use in uses.items()}
    for name, lengths in workloads.items():
        found = {f"{mark:g}": run_policy(Policy("paged-16"), lengths, case, mark) for mark in WATERMARKS}
        section.tables.append(_watermarks(name, len(lengths), found))
        section.results["watermarks"][name] = {mark: asdict(use) for mark, use in found.items()}
    return section


def _table(name: str, count: int, uses: dict[str, Use]) -> Table:
    base = uses["max"].throughput
    rows = tuple(
        (
            policy,
            f"{use.useful:.1%}",
            f"{use.mean_batch:.1f}",
            f"{use.throughput:,.0f} ({use.throughput / base:.2f})",
            str(use.preemptions),
        )
        for policy, use in uses.items()
    )
    return Table(
        f"KV capacity, {name} lengths (n = {count}), {A100_40G_SLOTS} slots: useful share of the allocated slots",
        ("policy", "useful", "mean batch", "tokens/s (against max)", "preemptions"),
        rows,
        "Whoever reserves is never preempted. Where prompts are long and outputs short, little is reserved in vain and "
        "the step is prefill: there the gain is small.",
    )


def _watermarks(name: str, count: int, found: dict[str, Use]) -> Table:
    rows = tuple(
        (
            mark,
            str(use.preemptions),
            f"{use.recomputed:.2f}",
            f"{use.mean_batch:.1f}",
            f"{use.throughput:,.0f}",
        )
        for mark, use in found.items()
    )
    return Table(
        f"Watermark, {name} lengths (n = {count}), paged-16: preemptions and what they cost",
        ("watermark", "preemptions", "prefill / prompt tokens", "mean batch", "tokens/s"),
        rows,
    )
