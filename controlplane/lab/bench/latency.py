"""What the gateway adds to a request's latency and to a stream's first token.

Layer: service. Added means: the quantile through the gateway less the same quantile of the direct path, both measured
in turns within one run. Two controls come along: the direct path against itself must add nothing, and an engine that
is late by a known time must show it. The plain relay in the same turns says what any relay adds on this machine.
"""

from __future__ import annotations

import random

from controlplane.lab.bench import closed, openloop
from controlplane.lab.bench.case import Bench, ms, ratio, times, whole
from controlplane.lab.bench.quantiles import Spread, spread
from controlplane.lab.bench.report import Section, Table

LATE_MS = 5
"""What the late engine waits."""
OPEN_RATE = 300
COLUMNS = (
    "what",
    "requests",
    "direct p50",
    "p99",
    "through p50",
    "p99",
    "added p50",
    "added p99",
    "ours/plain p50",
    "p99",
)


def latency(bench: Bench) -> Section:
    """Results, all in milliseconds: `added_ms_{p50,p99}_c1` (one request at a time), `added_ms_{p50,p99}_open300`
    (Poisson arrivals, 300 a second, from when each was due), `added_ttft_ms_{p50,p99}`, each with its
    `direct_ms_…`; `control_ms_{p50,p99}_c1` and `control_ms_{p50,p99}_open300` (the direct path against itself) and
    `late_engine_ms_p50` (must be about LATE_MS). What the plain relay adds: `plain_added_ms_{p50,p99}_c1` and
    `…_open300`; ours over that: `plain_added_ratio_{p50,p99}_c1` and `…_open300`, None where that is not above 0.
    """
    results: dict[str, float | None] = {}
    rows = [
        *_alone(bench, results),
        *_open(bench, results),
        *_first_token(bench, results),
    ]
    note = (
        "Added = through − direct, in turns within one run. The controls: direct against itself adds 0; "
        f"an engine {LATE_MS} ms late adds {LATE_MS}. The plain relay has no logic and is the machine's measure."
    )
    return Section([Table("Latency (ms)", COLUMNS, tuple(rows), note)], dict(results))


def _alone(bench: Bench, results: dict[str, float | None]) -> list[tuple[str, ...]]:
    bench.tell("latency, one request at a time")
    direct, gateway, plain = bench.deployment.direct, bench.deployment.gateway, bench.deployment.plain
    request = bench.request(direct)
    found = closed.take_turns(
        {
            "direct": (direct.port, request),
            "gateway": (gateway.port, bench.request(gateway)),
            "plain": (plain.port, bench.request(plain)),
            "again": (direct.port, request),
            "late": (direct.port, bench.request(direct, pace={"first_ms": str(LATE_MS)})),
        },
        seconds=bench.case.size(25, 4),
    )
    bench.deployment.check()
    base = spread(found["direct"].total)
    return [
        *_relays(
            "one at a time",
            "c1",
            results,
            base=base,
            ours=spread(found["gateway"].total),
            plain=spread(found["plain"].total),
        ),
        _row("control: direct again", base, spread(found["again"].total), results, "control_ms_{}_c1"),
        _row(f"control: engine {LATE_MS} ms late", base, spread(found["late"].total), results, "late_engine_ms_{}"),
    ]


def _open(bench: Bench, results: dict[str, float | None]) -> list[tuple[str, ...]]:
    bench.tell(f"latency, {OPEN_RATE} requests/s whether or not they are answered")
    direct = bench.deployment.direct
    arms = {"direct": direct, "gateway": bench.deployment.gateway, "plain": bench.deployment.plain, "again": direct}
    found: dict[str, list[float]] = {name: [] for name in arms}
    late: list[float] = []
    rng = random.Random(bench.case.seed)  # noqa: S311 - arrivals, not secrets
    seconds = bench.case.size(4, 2)
    for _ in range(int(bench.case.size(5, 1))):
        due = openloop.arrivals(OPEN_RATE, seconds, rng)
        for name, target in arms.items():
            run = openloop.run(target.port, bench.request(target), due)
            bench.deployment.check()
            if run.answered != len(run.times(200)) or run.lost:
                raise closed.LoadError(f"{name} refused or lost requests at {OPEN_RATE}/s ({run.lost} lost)")
            found[name] += run.times(200)
            late += run.late_s
    base = spread(found["direct"])
    name = f"open loop, {OPEN_RATE}/s"
    results["open300_sent_late_ms_p99"] = spread(late).p99_ms
    return [
        *_relays(name, "open300", results, base=base, ours=spread(found["gateway"]), plain=spread(found["plain"])),
        _row("control: direct again", base, spread(found["again"]), results, "control_ms_{}_open300"),
    ]


def _first_token(bench: Bench, results: dict[str, float | None]) -> list[tuple[str, ...]]:
    bench.tell("time to the first token")
    direct, gateway = bench.deployment.direct, bench.deployment.gateway
    pace = {"first_ms": "5", "token_ms": "2"}
    found = closed.take_turns(
        {
            target.name: (target.port, bench.request(target, tokens=4, stream=True, pace=pace))
            for target in (direct, gateway)
        },
        seconds=bench.case.size(15, 3),
        block=5,
        warm_up=5,
    )
    bench.deployment.check()
    base, through = spread(found[direct.name].first), spread(found[gateway.name].first)
    return [_row("TTFT, engine's 5 ms", base, through, results, "added_ttft_ms_{}", base_key="direct_ttft_ms_{}")]


def _relays(
    name: str, kind: str, results: dict[str, float | None], *, base: Spread, ours: Spread, plain: Spread
) -> list[tuple[str, ...]]:
    """The gateway's row, with its ratios to the plain relay's, and the relay's."""
    ratios = []
    for quantile, direct, through, relayed in zip(("p50", "p99"), base[1:], ours[1:], plain[1:], strict=True):
        ratios.append(ratio(through - direct, relayed - direct))
        results[f"plain_added_ratio_{quantile}_{kind}"] = ratios[-1]
    row = _row(name, base, ours, results, f"added_ms_{{}}_{kind}", base_key=f"direct_ms_{{}}_{kind}")
    return [
        (*row[:-2], *(times(each) for each in ratios)),
        _row(f"{name}, plain relay", base, plain, results, f"plain_added_ms_{{}}_{kind}"),
    ]


def _row(
    name: str, base: Spread, through: Spread, results: dict[str, float | None], key: str, *, base_key: str = ""
) -> tuple[str, ...]:
    """One line without ratios."""
    added = through.p50_ms - base.p50_ms, through.p99_ms - base.p99_ms
    for quantile, value, direct in zip(("p50", "p99"), added, base[1:], strict=True):
        results[key.format(quantile)] = value
        if base_key:
            results[base_key.format(quantile)] = direct
    figures = (base.p50_ms, base.p99_ms, through.p50_ms, through.p99_ms, *added)
    return (name, whole(through.n), *(ms(figure) for figure in figures), "", "")
