"""How many tokens a second one gateway process relays in streams, and what each costs it.

Layer: service. Two loads. One token at a time: each stream has a single token under way, so that every token is a read
and a write of its own in the gateway. Unpaced: the engine writes one token of each stream in every turn, as fast as it
can; a gateway that falls behind finds several in one read, which is cheaper for it. With 16 streams the plain relay
takes turns with the gateway, on its core: what a relay can do on this machine at all.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from controlplane.lab.bench import streams
from controlplane.lab.bench.case import STREAM_TOKENS, Bench, times, whole
from controlplane.lab.bench.processes import cpu_seconds
from controlplane.lab.bench.report import Section, Table
from controlplane.lab.bench.requests import Target

STREAMS = (16, 64)


PLAIN_STREAMS = 16
"""Streams at which the plain relay is measured too."""
COLUMNS = ("load", "tokens/s", "rounds", "ceiling, direct", "tokens per write", "CPU µs/token", "tokens/s, ours/plain")


@dataclass(slots=True)
class Rounds:
    """What each round at one target found."""

    target: Target
    pid: int
    rates: list[float] = field(default_factory=list)
    grouped: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def measure(self, bench: Bench, count: int, single: bool) -> None:
        """One more round. Raises LoadError."""
        run, spent = _run(bench, self.target, self.pid, count, single)
        self.rates.append(run.tokens_per_s)
        self.grouped.append(run.tokens_per_write)
        self.cpu_us.append(spent / run.tokens * 1e6)

    def note(self, results: dict[str, float], prefix: str, count: int, single: bool) -> None:
        kind = "single_" if single else ""
        results[f"{prefix}relay_{kind}tokens_per_s_{count}"] = statistics.median(self.rates)
        results[f"{prefix}cpu_us_per_{kind}token_{count}"] = statistics.median(self.cpu_us)
        if not single:
            results[f"{prefix}relay_tokens_per_write_{count}"] = statistics.median(self.grouped)

    def row(self, name: str, ceiling: float) -> tuple[str, ...]:
        rate, grouped, cpu = (statistics.median(each) for each in (self.rates, self.grouped, self.cpu_us))
        spread = f"{whole(min(self.rates))} to {whole(max(self.rates))}"
        return (name, whole(rate), spread, whole(ceiling), f"{grouped:.1f}", f"{cpu:.1f}")


def relaying(bench: Bench) -> Section:
    """Results, for 16 and 64 streams: `relay_tokens_per_s_N` (unpaced: the engine writes each token on its own),
    `relay_tokens_per_write_N` (how many of them the gateway passed on at once), `relay_single_tokens_per_s_N` (one
    token under way in each stream), `cpu_us_per_token_N` and `cpu_us_per_single_token_N`, and
    `ceiling_tokens_per_s_N`, `ceiling_single_tokens_per_s_N`: the same straight from the engine. For 16 streams the
    plain relay's under `plain_…`, and ours over its: `plain_tokens_ratio_16`, `plain_single_tokens_ratio_16`.
    """
    results: dict[str, float] = {}
    rows = []
    for count in STREAMS:
        for single in (False, True):
            bench.tell(f"{count} streams, {'one token at a time' if single else 'unpaced'}")
            rows += _with(bench, count, single, results)
    note = (
        f"Streams of {STREAM_TOKENS} tokens, begun again as they end; CPU includes beginning them. The engine writes "
        "every token on its own; tokens per write is what the gateway made of it. The plain relay has no logic and is "
        "the machine's measure."
    )
    return Section([Table("Tokens, streamed", COLUMNS, tuple(rows), note)], dict(results))


def _with(bench: Bench, count: int, single: bool, results: dict[str, float]) -> list[tuple[str, ...]]:
    deployment = bench.deployment
    ceiling = Rounds(deployment.direct, deployment.gateway_pid)
    ours = Rounds(deployment.gateway, deployment.gateway_pid)
    plain = Rounds(deployment.plain, deployment.plain_pid) if count == PLAIN_STREAMS else None
    for _ in range(int(bench.case.size(3, 1))):
        for each in (ceiling, ours, plain):
            if each is not None:
                each.measure(bench, count, single)
    kind = "single_" if single else ""
    load = f"{count} streams, {'one token at a time' if single else 'unpaced'}"
    bound = statistics.median(ceiling.rates)
    results[f"ceiling_{kind}tokens_per_s_{count}"] = bound
    ours.note(results, "", count, single)
    if plain is None:
        return [(*ours.row(load, bound), "")]
    plain.note(results, "plain_", count, single)
    found = statistics.median(ours.rates) / statistics.median(plain.rates)
    results[f"plain_{kind}tokens_ratio_{count}"] = found
    return [(*ours.row(load, bound), times(found)), (*plain.row(f"{load}, plain relay", bound), "")]


def _run(bench: Bench, target: Target, pid: int, count: int, single: bool) -> tuple[streams.StreamRun, float]:
    """A run and the CPU seconds that it took `pid` and its children."""
    marks: list[float] = []
    requests = [
        bench.request(target, tokens=STREAM_TOKENS, stream=True, pace={"stream": str(number)} if single else None)
        for number in range(count)
    ]
    run = streams.run(
        target.port,
        requests,
        seconds=bench.case.size(5, 1.5),
        receipts=bench.deployment.engine_port if single else None,
        on_begin=lambda: marks.append(cpu_seconds(pid)),
        on_end=lambda: marks.append(cpu_seconds(pid)),
    )
    bench.deployment.check()
    return run, marks[1] - marks[0]
