"""How many tokens a second one gateway process relays in streams, and what each costs it.

Layer: service. Two loads. One token at a time: each stream has a single token under way, so that every token is a read
and a write of its own in the gateway. Unpaced: the engine writes one token of each stream in every turn, as fast as it
can; a gateway that falls behind finds several in one read, which is cheaper for it. With 16 streams the plain relay
takes turns with the gateway, on its core: what a relay can do on this machine at all.
"""

from __future__ import annotations

from controlplane.lab.bench import streams
from controlplane.lab.bench.case import STREAM_TOKENS, Bench, times, whole
from controlplane.lab.bench.report import Section, Table
from controlplane.lab.bench.requests import Target
from controlplane.lab.bench.rounds import Rounds
from dataplane.bench.processes import cpu_seconds

STREAMS = (16, 64)

PLAIN_STREAMS = 16
"""Streams at which the plain relay is measured too."""
COLUMNS = ("load", "tokens/s", "rounds", "ceiling, direct", "tokens per write", "CPU µs/token", "tokens/s, ours/plain")


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
                _measure(bench, each, count, single)
    kind = "single_" if single else ""
    load = f"{count} streams, {'one token at a time' if single else 'unpaced'}"
    bound = ceiling.median("rate")
    results[f"ceiling_{kind}tokens_per_s_{count}"] = bound
    _note(ours, results, "", count, single)
    if plain is None:
        return [(*_row(ours, load, bound), "")]
    _note(plain, results, "plain_", count, single)
    found = ours.median("rate") / plain.median("rate")
    results[f"plain_{kind}tokens_ratio_{count}"] = found
    return [(*_row(ours, load, bound), times(found)), (*_row(plain, f"{load}, plain relay", bound), "")]


def _measure(bench: Bench, rounds: Rounds, count: int, single: bool) -> None:
    """One more round. Raises LoadError."""
    run, spent = _run(bench, rounds.target, rounds.pid, count, single)
    rounds.add(rate=run.tokens_per_s, grouped=run.tokens_per_write, cpu_us=spent / run.tokens * 1e6)


def _note(rounds: Rounds, results: dict[str, float], prefix: str, count: int, single: bool) -> None:
    kind = "single_" if single else ""
    results[f"{prefix}relay_{kind}tokens_per_s_{count}"] = rounds.median("rate")
    results[f"{prefix}cpu_us_per_{kind}token_{count}"] = rounds.median("cpu_us")
    if not single:
        results[f"{prefix}relay_tokens_per_write_{count}"] = rounds.median("grouped")


def _row(rounds: Rounds, name: str, ceiling: float) -> tuple[str, ...]:
    grouped, cpu = rounds.median("grouped"), rounds.median("cpu_us")
    return (name, whole(rounds.median("rate")), rounds.spread("rate"), whole(ceiling), f"{grouped:.1f}", f"{cpu:.1f}")


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
