"""`tidegate bench gateway`: what the gateway costs, beside the same load without it.

Layer: service. It puts the parts together; each says in its own module what it measures and what its control is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from rich.console import Console

from controlplane.lab.bench import wrk
from controlplane.lab.bench.against import against as beside
from controlplane.lab.bench.case import STREAM_TOKENS, TOKENS, Bench, GatewayCase, Part
from controlplane.lab.bench.deployment import MAX_IN_FLIGHT, Deployment
from controlplane.lab.bench.latency import latency
from controlplane.lab.bench.memory import memory
from controlplane.lab.bench.overload import overload
from controlplane.lab.bench.relaying import relaying
from controlplane.lab.bench.report import Report
from controlplane.lab.bench.throughput import throughput
from controlplane.lab.bench.wire import PROMPT_TOKENS

PARTS: dict[str, Part] = {
    "latency": latency,
    "throughput": throughput,
    "streams": relaying,
    "overload": overload,
    "memory": memory,
}


def run(
    case: GatewayCase,
    *,
    only: Collection[str] = (),
    install: bool = False,
    against: bool = False,
    environments: Path | None = None,
    console: Console,
    tell: Callable[[str], None],
) -> Report:
    """Start the deployment, run the parts (`only` those, or all) and with `against` the comparison, stop it.

    `results` has the keys that each part's function documents. Raises LocalError when something cannot be started or
    ended while it was measured, LoadError when it did not answer as it must.
    """
    load = wrk.find(install=install, tell=tell)
    names = [name for name in PARTS if not only or name in only]
    report = Report(
        "gateway",
        {
            "parts": names,
            "against": against,
            "quick": case.quick,
            "seed": case.seed,
            "prompt_tokens": PROMPT_TOKENS,
            "tokens": TOKENS,
            "stream_tokens": STREAM_TOKENS,
            "max_in_flight": MAX_IN_FLIGHT,
        },
        case.seed,
        tools={"wrk": wrk.version(load)},
    )
    with Deployment(console) as deployment:
        bench = Bench(case, deployment, load, tell)
        for name in names:
            report.take(PARTS[name](bench))
        if against:
            report.take(beside(bench, environments))
    return report
