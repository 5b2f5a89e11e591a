"""What the Overview's templates show, built from the telemetry service's answer.

Layer: service. Pure: an `Overview` goes in, texts and tones come out. Gateway-side and
engine-side latencies stay in rows of their own; nothing here averages, fills gaps or invents a figure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from controlplane.console import presenters
from controlplane.console.presenters import Figure, QuantileRow
from controlplane.console.sparkline import Sparkline, sparkline
from controlplane.telemetry.schemas import Figures, Overview, Quantiles, ScopedFigures, Series
from controlplane.tenants.schemas import PROBE_TENANT, SLUG_PATTERN
from dataplane.protocol import WINDOW_SECONDS, ReplicaState

WINDOWS = (60, 300, 900, 3600)
DEFAULT_WINDOW = 300


@dataclass(frozen=True, slots=True)
class Tone:
    """How a state looks: a tone for colour, an icon and a word, so that colour is never the only signal."""

    name: str
    icon: str
    label: str
    help: str


STATES: dict[str, Tone] = {
    ReplicaState.STARTING: Tone("info", "loader", "Starting", "Loads its model; takes no requests yet."),
    ReplicaState.READY: Tone("ok", "check", "Ready", "Takes requests."),
    ReplicaState.DRAINING: Tone("warn", "pause", "Draining", "Finishes what runs; takes nothing new."),
    ReplicaState.FAILED: Tone("bad", "cross", "Failed", "Said that it cannot serve."),
    ReplicaState.STALE: Tone("warn", "clock", "Stale", "Silent for some seconds; gateways route around it."),
    ReplicaState.LOST: Tone("bad", "unplugged", "Lost", "Silent for long; counted as gone until it reports."),
}
NO_STATE = Tone("muted", "question", "Unknown", "Traffic was seen, but no replica of this name is registered.")


def tone(state: str) -> Tone:
    """The look of a replica's state; an unregistered replica has none."""
    return STATES.get(state, NO_STATE)


@dataclass(frozen=True, slots=True)
class Stat:
    """One tile: a headline figure, what qualifies it, and its recent course. `meter` is 0..1 for a bar."""

    key: str
    label: str
    figure: Figure
    details: tuple[str, ...] = ()
    spark: Sparkline | None = None
    meter: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How requests ended: how many, and each cause with its own count."""

    label: str
    count: str
    tone: str
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScopeRow:
    """One line of the tables by replica and by tenant. `has_page` is False for what stands for no tenant; `probe` marks
    the tenant that canaries act as, which no sum takes in.
    """

    key: str
    label: str
    has_page: bool
    probe: bool
    tone: Tone
    execution: str
    """How a replica runs its model; empty where it has not said."""
    requests: Figure
    prompt: Figure
    output: Figure
    ttft: QuantileRow
    tpot: QuantileRow
    engine_ttft: QuantileRow
    engine_tpot: QuantileRow
    hit: Figure
    engine_hit: Figure
    kv_used: Figure
    kv_waste: Figure
    running: Figure
    waiting: Figure
    finished: str
    refused: str
    failed: str
    cancelled: str
    forged: str
    """How many headers were forged; empty when none was."""


@dataclass(frozen=True, slots=True)
class OverviewPage:
    window: str
    stats: tuple[Stat, ...]
    outcomes: tuple[Outcome, ...]
    ttft: tuple[QuantileRow, ...]
    tpot: tuple[QuantileRow, ...]
    e2e: tuple[QuantileRow, ...]
    bucket_error: str
    covered: str
    forged: str
    replicas: tuple[ScopeRow, ...]
    tenants: tuple[ScopeRow, ...]


def overview_page(overview: Overview) -> OverviewPage:
    """All texts of the Overview page."""
    total = overview.total
    window = presenters.window_label(overview.window_s)
    return OverviewPage(
        window=window,
        stats=_stats(total, overview.series, window),
        outcomes=_outcomes(total),
        ttft=(
            gateway_row("Gateway, first token", total.ttft, "From arrival at the gateway, queue included."),
            gateway_row("Gateway, first visible", total.ttft_visible, "The first token that carries text to show."),
            engine_row("Engine", total.engine_ttft, "From arrival at the replica."),
        ),
        tpot=(
            gateway_row("Gateway", total.tpot, "(last − first) ÷ (tokens − 1) of each request, as relayed."),
            engine_row("Engine", total.engine_tpot, "The same quotient, as the engine produced it."),
        ),
        e2e=(gateway_row("Gateway", total.e2e, "From arrival to the last byte."),),
        bucket_error=presenters.bucket_error(total.ttft, total.tpot, total.e2e, total.engine_ttft, total.engine_tpot),
        covered=_covered(total, overview.window_s),
        forged=_forged(total),
        replicas=tuple(_scope(row) for row in overview.by_replica),
        tenants=tuple(_scope(row) for row in overview.by_tenant),
    )


def _covered(total: Figures, window_s: int) -> str:
    """How much of the window reports cover, when that is visibly less than all of it."""
    covered_s = total.request_rate.window_s if total.request_rate else None
    return presenters.age(covered_s) if covered_s is not None and covered_s < window_s - WINDOW_SECONDS else ""


def gateway_row(label: str, quantiles: Quantiles, hint: str = "") -> QuantileRow:
    """As the gateways saw it."""
    return presenters.quantile_row(label, quantiles, side="gateway", hint=hint)


def engine_row(label: str, quantiles: Quantiles, hint: str = "") -> QuantileRow:
    """As the engines saw it."""
    return presenters.quantile_row(label, quantiles, side="engine", hint=hint)


def _stats(total: Figures, series: Series, window: str) -> tuple[Stat, ...]:
    ttft, tpot = presenters.duration(total.ttft.p95), presenters.duration(total.tpot.p95)
    prompt, output = presenters.rate(total.prompt_rate, "tok/s"), presenters.rate(total.output_rate, "tok/s")
    used, waste = presenters.percent(total.kv_used), presenters.percent(total.kv_waste)
    hit, engine_hit = presenters.percent(total.prefix_hit), presenters.percent(total.engine_prefix_hit)
    running, waiting = presenters.whole(total.running), presenters.whole(total.waiting)
    return (
        Stat(
            "requests",
            "Requests",
            presenters.rate(total.request_rate),
            (f"{_counted(total, total.accepted)} accepted in {window}",),
            sparkline(series.request_rate),
        ),
        Stat(
            "ttft",
            "TTFT p95, gateway",
            ttft,
            (f"n {presenters.count(total.ttft.n)}", f"engine {presenters.duration(total.engine_ttft.p95)}"),
            sparkline(series.ttft_p95),
        ),
        Stat(
            "tpot",
            "TPOT p95, gateway",
            tpot,
            (f"n {presenters.count(total.tpot.n)}", f"engine {presenters.duration(total.engine_tpot.p95)}"),
            sparkline(series.tpot_p95),
        ),
        Stat("output", "Output tokens", output, (f"prompt {prompt}",), sparkline(series.output_rate)),
        Stat("kv", "KV cache used", used, (f"waste {waste}",), meter=used.value),
        Stat("hit", "Prefix hit, gateway", hit, (f"engine {engine_hit}", "first attempts"), meter=hit.value),
        Stat("running", "Running", running, (f"{waiting} waiting",)),
    )


OUTCOMES = (("Refused", "refused", "warn"), ("Failed", "failed", "bad"))
MAX_CAUSES = 20


def _outcomes(total: Figures) -> tuple[Outcome, ...]:
    rows = [Outcome("Finished", _counted(total, sum(total.finished.values())), "muted", _causes(total.finished))]
    for label, name, colour in OUTCOMES:
        counts: dict[str, int] = getattr(total, name)
        n = sum(counts.values())
        rows.append(Outcome(label, _counted(total, n), colour if n else "muted", _causes(counts)))
    rows.append(Outcome("Cancelled", _counted(total, total.cancelled), "muted", ("by the client",)))
    return tuple(rows)


def _counted(figures: Figures, n: int) -> str:
    """A count of requests; unknown, not 0, while no gateway has reported."""
    return presenters.NONE if figures.request_rate is None else presenters.count(n)


def _causes(counts: dict[str, int]) -> tuple[str, ...]:
    """The most frequent first; past `MAX_CAUSES` only how many more there are."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{cause}\N{NO-BREAK SPACE}{presenters.count(n)}" for cause, n in ordered[:MAX_CAUSES]]
    return (*named, f"and {len(ordered) - MAX_CAUSES} more") if len(ordered) > MAX_CAUSES else tuple(named)


def _scope(row: ScopedFigures) -> ScopeRow:
    figures = row.figures
    return ScopeRow(
        key=row.key,
        label=row.label,
        has_page=re.fullmatch(SLUG_PATTERN, row.key) is not None,
        probe=row.key == PROBE_TENANT,
        tone=tone(row.state),
        execution=presenters.execution(row.ready),
        requests=presenters.rate(figures.request_rate),
        prompt=presenters.rate(figures.prompt_rate, "tok/s"),
        output=presenters.rate(figures.output_rate, "tok/s"),
        ttft=gateway_row("TTFT", figures.ttft),
        tpot=gateway_row("TPOT", figures.tpot),
        engine_ttft=engine_row("TTFT", figures.engine_ttft),
        engine_tpot=engine_row("TPOT", figures.engine_tpot),
        hit=presenters.percent(figures.prefix_hit),
        engine_hit=presenters.percent(figures.engine_prefix_hit),
        kv_used=presenters.percent(figures.kv_used),
        kv_waste=presenters.percent(figures.kv_waste),
        running=presenters.whole(figures.running),
        waiting=presenters.whole(figures.waiting),
        finished=_counted(figures, sum(figures.finished.values())),
        refused=_counted(figures, sum(figures.refused.values())),
        failed=_counted(figures, sum(figures.failed.values())),
        cancelled=_counted(figures, figures.cancelled),
        forged=_forged(figures),
    )


def _forged(figures: Figures) -> str:
    """Headers that claimed to come from inside; empty when there was none."""
    if not figures.forged:
        return ""
    return f"{presenters.count(figures.forged)} forged header{'' if figures.forged == 1 else 's'}"
