"""How many tokens a second one gateway process relays in streams, and what each costs it.

Layer: service. Two loads. One token at a time: each stream has a single token under way, so that every token is a read
and a write of its own in the gateway. Unpaced: the engine writes one token of each stream in every turn, as fast as it
can; a gateway that falls behind finds several in one read, which is cheaper for it.
"""

from __future__ import annotations

import statistics

from controlplane.lab.bench import streams
from controlplane.lab.bench.case import STREAM_TOKENS, Bench, whole
from controlplane.lab.bench.processes import cpu_seconds
from controlplane.lab.bench.report import Section, Table
from controlplane.lab.bench.requests import Target

STREAMS = (16, 64)


def relaying(bench: Bench) -> Section:
    """Results, for 16 and 64 streams: `relay_tokens_per_s_N` (unpaced: the engine writes each token on its own),
    `relay_tokens_per_write_N` (how many of them the gateway passed on at once), `relay_single_tokens_per_s_N` (one
    token under way in each stream), `cpu_us_per_token_N` and `cpu_us_per_single_token_N`, and
    `ceiling_tokens_per_s_N`, `ceiling_single_tokens_per_s_N`: the same straight from the engine.
    """
    results: dict[str, float] = {}
    rows = []
    for count in STREAMS:
        for single in (False, True):
            kind = "single_" if single else ""
            bench.tell(f"{count} streams, {'one token at a time' if single else 'unpaced'}")
            ceiling, rates, grouped, cpu = [], [], [], []
            for _ in range(int(bench.case.size(3, 1))):
                ceiling.append(_run(bench, bench.deployment.direct, count, single)[0].tokens_per_s)
                run, spent = _run(bench, bench.deployment.gateway, count, single)
                rates.append(run.tokens_per_s)
                grouped.append(run.tokens_per_write)
                cpu.append(spent / run.tokens * 1e6)
            medians = [statistics.median(each) for each in (rates, ceiling, grouped, cpu)]
            results[f"relay_{kind}tokens_per_s_{count}"] = medians[0]
            results[f"ceiling_{kind}tokens_per_s_{count}"] = medians[1]
            results[f"cpu_us_per_{kind}token_{count}"] = medians[3]
            if not single:
                results[f"relay_tokens_per_write_{count}"] = medians[2]
            load = "one token at a time" if single else "unpaced"
            spread = f"{whole(min(rates))} to {whole(max(rates))}"
            figures = (whole(medians[0]), spread, whole(medians[1]), f"{medians[2]:.1f}", f"{medians[3]:.1f}")
            rows.append((f"{count} streams, {load}", *figures))
    columns = ("load", "tokens/s", "rounds", "ceiling, direct", "tokens per write", "CPU µs/token")
    note = (
        f"Streams of {STREAM_TOKENS} tokens, begun again as they end; CPU includes beginning them. The engine writes "
        "every token on its own; tokens per write is what the gateway made of it."
    )
    return Section([Table("Tokens, streamed", columns, tuple(rows), note)], dict(results))


def _run(bench: Bench, target: Target, count: int, single: bool) -> tuple[streams.StreamRun, float]:
    """A run and the CPU seconds that it took the gateway."""
    pid = bench.deployment.gateway_pid
    marks: list[float] = []
    requests = [
        bench.request(target, tokens=STREAM_TOKENS, stream=True, pace={"stream": str(number)} if single else None)
        for number in range(count)
    ]
    run = streams.run(
        target.port,
        requests,
        seconds=bench.case.size(5, 2),
        receipts=bench.deployment.engine_port if single else None,
        on_begin=lambda: marks.append(cpu_seconds(pid)),
        on_end=lambda: marks.append(cpu_seconds(pid)),
    )
    bench.deployment.check()
    return run, marks[1] - marks[0]
