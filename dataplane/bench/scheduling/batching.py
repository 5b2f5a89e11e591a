"""What it gains to let requests join a batch that runs.

Layer: service. One knob: `SchedulerConfig.batching`. Memory never runs out, and the token budget lets a whole batch
begin at once. Outputs of equal length are the control: nobody ends early, so there is nothing to gain. Source: Yu et
al., Orca (2022). For outputs of exponential length a static batch of B takes H_B = 1 + 1/2 + … + 1/B mean outputs.
"""

from __future__ import annotations

from contextlib import suppress

from dataplane.bench.report import Table
from dataplane.bench.scheduling.case import BLOCK, CONTEXT, MANY, SchedulerCase, Section, pool
from dataplane.bench.simulated import Outcome, simulate
from dataplane.bench.traces import TraceMissingError, Traces
from dataplane.bench.workload import Lengths, exponential, lengths_of, mean, percentile, poisson, requests_of
from dataplane.scheduling.config import Batching, SchedulerConfig

BATCHES = (8, 32)
MODES = (Batching.STATIC, Batching.DYNAMIC, Batching.CONTINUOUS, Batching.SELECTIVE)
OUTPUT = 256
"""Mean output of the made-up workloads, in tokens; their prompts are one block."""
WINDOW_S = 0.5
"""How long a dynamic batch waits."""
LIGHT = 0.3
"""Share of continuous batching's throughput at which requests arrive in the light load."""


def run_mode(
    mode: Batching, batch: int, lengths: list[Lengths], case: SchedulerCase, rate: float | None = None
) -> Outcome:
    """One mode over `lengths`, all at once or at `rate` requests per second."""
    longest = max(prompt for prompt, _ in lengths)
    config = SchedulerConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=batch * longest,
        watermark=0.0,
        max_waiting=MANY,
        batching=mode,
        batch_window_s=WINDOW_S,
    )
    slots = batch * (max(prompt + output for prompt, output in lengths) + BLOCK)
    arrivals = None if rate is None else poisson(rate, case.seed)
    return simulate(requests_of(lengths, arrivals), config, pool(slots), cost=case.cost)


def workloads(case: SchedulerCase, traces: Traces, batch: int) -> dict[str, list[Lengths]]:
    """Lengths by name; the control first. Without the trace, those that are made up."""
    count = batch * case.size(32, 16)
    found = {
        "equal": [(BLOCK, OUTPUT)] * count,
        "exponential": exponential(count, OUTPUT, case.seed, BLOCK),
    }
    with suppress(TraceMissingError):
        found["azure conv"] = lengths_of(traces.read("conv", 2 * count).rows, CONTEXT)[:count]
    return found


def batching(case: SchedulerCase, traces: Traces) -> Section:
    """Results: `throughput` → workload → batch → mode → output tokens/s, `ratio` likewise against static, and
    `light` → mode → {ttft_mean_s, ttft_p99_s, latency_mean_s} at a light load."""
    throughput: dict[str, dict[str, dict[str, float]]] = {}
    ratio: dict[str, dict[str, dict[str, float]]] = {}
    rows = []
    for batch in BATCHES:
        for name, lengths in workloads(case, traces, batch).items():
            found = {mode.value: run_mode(mode, batch, lengths, case).throughput for mode in MODES}
            ratios = {mode: each / found["static"] for mode, each in found.items()}
            throughput.setdefault(name, {})[str(batch)] = found
            ratio.setdefault(name, {})[str(batch)] = ratios
            cells = (f"{found[mode]:,.0f} ({ratios[mode]:.2f})" for mode in found)
            rows.append((f"{name}, B = {batch}", str(len(lengths)), *cells))
    rows.sort(key=lambda row: row[0].partition(",")[0] != "equal")
    table = Table(
        "Batching: output tokens/s (against static), all requests waiting",
        ("lengths", "n", *(mode.value for mode in MODES)),
        tuple(rows),
        "Control: with outputs of equal length nobody leaves early and the gain must be 1.00 ± 0.01. The losing regime "
        "is the same: no variance, no gain. Azure's prompts are long, and prefill costs all modes the same.",
    )
    light, latencies = _light(case, throughput["exponential"]["8"]["continuous"] / OUTPUT)
    return Section([table, light], {"throughput": throughput, "ratio": ratio, "light": latencies})


def _light(case: SchedulerCase, capacity: float) -> tuple[Table, dict[str, dict[str, float]]]:
    """The price of a batch that waits: time to the first token where there is no queue. `capacity` in requests/s."""
    lengths = exponential(case.size(400, 100), OUTPUT, case.seed, BLOCK)
    rows, results = [], {}
    for mode in MODES:
        outcome = run_mode(mode, 8, lengths, case, LIGHT * capacity)
        found = {"ttft_mean_s": mean(outcome.ttft), "ttft_p99_s": percentile(outcome.ttft, 0.99)}
        results[mode.value] = found | {"batch_mean": outcome.mean_batch}
        rows.append(
            (mode.value, f"{found['ttft_mean_s']:.3f}", f"{found['ttft_p99_s']:.3f}", f"{outcome.mean_batch:.1f}")
        )
    title = f"Batching at {LIGHT:.0%} of continuous throughput: time to the first token (s), B = 8, exponential"
    note = f"Static and dynamic batches lose: a request waits for the batch before it, or {WINDOW_S} s for company."
    return Table(title, ("mode", "mean", "p99", "mean batch"), tuple(rows), note), results
