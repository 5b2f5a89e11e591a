"""Whether the gateway's memory stays flat.

Layer: service. Resident memory of the gateway's processes while requests go through; growth counts after a warm-up, in
which pools, caches and the allocator fill.
"""

from __future__ import annotations

from controlplane.lab.bench.case import Bench, whole
from controlplane.lab.bench.report import Section, Table
from controlplane.lab.bench.throughput import load
from dataplane.bench.processes import resident_bytes

REQUESTS = 100_000
QUICK_REQUESTS = 6_000
WARM_UP = 0.2
"""Share of the requests that is warm-up."""
CONNECTIONS = 32
MIB = 1024 * 1024


def memory(bench: Bench) -> Section:
    """Results: `rss_growth_mb` (MiB: the end less the end of the warm-up), `rss_mb` at the end, `rss_requests`, and
    `rss_mb_by_requests`: [requests so far, MiB] all along.
    """
    wanted = int(bench.case.size(REQUESTS, QUICK_REQUESTS))
    pid = bench.deployment.gateway_pid
    samples = [(0, resident_bytes(pid) / MIB)]
    while samples[-1][0] < wanted:
        bench.tell(f"memory, {samples[-1][0]:,} of {wanted:,} requests")
        run = load(bench, bench.deployment.gateway, CONNECTIONS)
        samples.append((samples[-1][0] + run.requests, resident_bytes(pid) / MIB))
    warm = next((held for count, held in samples if count >= wanted * WARM_UP), samples[-1][1])
    last = samples[-1]
    results = {
        "rss_growth_mb": last[1] - warm,
        "rss_mb": last[1],
        "rss_requests": last[0],
        "rss_mb_by_requests": [list(sample) for sample in samples],
    }
    row = (whole(last[0]), f"{samples[0][1]:.1f}", f"{warm:.1f}", f"{last[1]:.1f}", f"{last[1] - warm:+.1f}")
    columns = ("requests", "at first MiB", f"after {WARM_UP:.0%} MiB", "at the end MiB", "growth MiB")
    return Section([Table("Resident memory of the gateway's processes", columns, (row,))], dict(results))
