"""This gateway beside others: the same fake engine, the same loads, in turns.

Layer: service. All gateways run on one core and take turns, so that each has it alone while it is measured and what
disturbs the machine disturbs all of them. Ratios compare medians of the same run.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from controlplane.lab.bench import closed, streams
from controlplane.lab.bench.case import STREAM_TOKENS, Bench, ms, whole
from controlplane.lab.bench.closed import LoadError
from controlplane.lab.bench.quantiles import spread
from controlplane.lab.bench.report import Section, Table
from controlplane.lab.bench.requests import Target
from controlplane.lab.bench.rivals import SOURCES, Plan, Rival
from controlplane.lab.bench.throughput import load
from dataplane.bench.errors import NotToBeHadError

CONNECTIONS = 16
STREAMS = 16
US = "tidegate"


def against(bench: Bench, environments: Path | None) -> Section:
    """Results under `against`: for each gateway `requests_per_s_c16`, `added_ms_p50_c1`, `added_ms_p99_c1` and
    `stream_tokens_per_s_16` (None, and `streams_missing`, where it relays none), with ours of the same turns under
    `ours_…`; `setup` and `version`; `requests_ratio` and `added_p50_ratio`, ours over theirs. Or `missing`: why it is
    missing.

    Environments are made in `environments` and left there, or in a temporary folder that is removed.
    """
    with tempfile.TemporaryDirectory(prefix="tidegate-rivals-") as temporary:
        folder = environments or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        plans, missing = _plans(bench, folder)
        found: dict[str, dict[str, Any]] = {}
        for plan in plans:
            try:
                with Rival(plan, bench.deployment) as rival:
                    found[plan.name] = _pair(bench, rival.target)
            except (NotToBeHadError, LoadError) as error:
                missing[plan.name] = str(error)
            else:
                found[plan.name] |= {"setup": plan.setup, "version": plan.version}
    return _section(found, missing)


def _plans(bench: Bench, folder: Path) -> tuple[list[Plan], dict[str, str]]:
    plans: list[Plan] = []
    missing: dict[str, str] = {}
    for name, source in SOURCES:
        try:
            plans += source(bench.deployment, folder, bench.tell)
        except NotToBeHadError as error:
            missing[name] = str(error)
    return plans, missing


def _pair(bench: Bench, rival: Target) -> dict[str, Any]:
    """Both gateways' figures, measured in turns."""
    bench.tell(f"against {rival.name}")
    direct, ours = bench.deployment.direct, bench.deployment.gateway
    arms = {"direct": direct, US: ours, "theirs": rival}
    found = closed.take_turns(
        {name: (target.port, bench.request(target)) for name, target in arms.items()},
        seconds=bench.case.size(15, 4),
        block=5,
        warm_up=50,
    )
    base = spread(found["direct"].total)
    rates: dict[str, list[float]] = {US: [], "theirs": []}
    tokens: dict[str, list[float]] = {US: [], "theirs": []}
    broken = _broken_stream(rival, bench)
    for _ in range(int(bench.case.size(3, 1))):
        for name, target in ((US, ours), ("theirs", rival)):
            rates[name].append(load(bench, target, CONNECTIONS).requests_per_s)
            if target is ours or not broken:
                tokens[name].append(_tokens_per_s(bench, target))
    figures: dict[str, Any] = {}
    for name, prefix in ((US, "ours_"), ("theirs", "")):
        times = spread(found[name].total)
        figures[f"{prefix}added_ms_p50_c1"] = times.p50_ms - base.p50_ms
        figures[f"{prefix}added_ms_p99_c1"] = times.p99_ms - base.p99_ms
        figures[f"{prefix}requests_per_s_c16"] = statistics.median(rates[name])
        figures[f"{prefix}stream_tokens_per_s_16"] = statistics.median(tokens[name]) if tokens[name] else None
    figures["requests_ratio"] = figures["ours_requests_per_s_c16"] / figures["requests_per_s_c16"]
    figures["added_p50_ratio"] = figures["ours_added_ms_p50_c1"] / figures["added_ms_p50_c1"]
    if broken:
        figures["streams_missing"] = broken
    return figures


def _broken_stream(rival: Target, bench: Bench) -> str:
    """Why `rival` relays no stream; empty when it does."""
    request = bench.request(rival, tokens=2, stream=True)
    try:
        with closed.Caller(rival.name, rival.port, request) as caller:
            return "" if caller.call().stream.tokens else "its stream carries no tokens"
    except LoadError as error:
        return str(error)


def _tokens_per_s(bench: Bench, target: Target) -> float:
    requests = [bench.request(target, tokens=STREAM_TOKENS, stream=True)] * STREAMS
    return streams.run(target.port, requests, seconds=bench.case.size(6, 3), warm_up=1.0).tokens_per_s


def _section(found: dict[str, dict[str, Any]], missing: dict[str, str]) -> Section:
    rows: list[tuple[str, ...]] = []
    notes = []
    for name, figures in found.items():
        notes.append(f"{name}: {figures['setup']}.")
        if "streams_missing" in figures:
            notes.append(f"{name} relays no stream: {figures['streams_missing']}.")
        for who, prefix in ((US, "ours_"), (f"{name} {figures['version']}", "")):
            tokens = figures[f"{prefix}stream_tokens_per_s_16"]
            cells = (
                whole(figures[f"{prefix}requests_per_s_c16"]),
                ms(figures[f"{prefix}added_ms_p50_c1"]),
                ms(figures[f"{prefix}added_ms_p99_c1"]),
                "-" if tokens is None else whole(tokens),
            )
            ratios = ("", "") if prefix else (f"{figures['requests_ratio']:.1f}×", f"{figures['added_p50_ratio']:.3f}×")
            rows.append((who, *cells, *ratios))
    rows += [(name, *("-",) * 6) for name in missing]
    notes += [f"{name} is not measured: {why}." for name, why in missing.items()]
    columns = (
        "gateway",
        f"requests/s, {CONNECTIONS}",
        "added p50 ms",
        "added p99 ms",
        f"tokens/s, {STREAMS} streams",
        "our requests/s are",
        "our added p50 is",
    )
    notes.append("Each pair in turns within one run, on one core, against the same fake engine; streams are unpaced.")
    results = {**found, **{name: {"missing": why} for name, why in missing.items()}}
    return Section([Table("Against other gateways", columns, tuple(rows), "\n".join(notes))], {"against": results})
