"""What the Replicas page shows of one replica.

Layer: service. Pure: the fleet's and the telemetry's answers go in, texts go out. Configured facts and observed
figures stay apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.console import presenters, views
from controlplane.console.presenters import Figure, QuantileRow
from controlplane.evidence import Evidence, EvidenceKind
from controlplane.fleet.schemas import ReplicaView
from controlplane.telemetry.schemas import Figures, ScopedFigures


@dataclass(frozen=True, slots=True)
class ReplicaCard:
    """One replica as the Replicas page shows it. `facts` are configured, the figures observed."""

    replica: str
    pool: str
    model: str
    url: str
    runs_on: str
    tone: views.Tone
    reason: str
    since: float
    age: str
    restarts: int
    boot_epoch: int
    core_epoch: int
    policy_epoch: int
    started_at: float | None
    running: Figure
    waiting: Figure
    kv: Figure
    kv_text: str
    latencies: tuple[tuple[str, QuantileRow], ...]
    facts: tuple[tuple[str, str], ...] = field(default=())


def replica_card(view: ReplicaView, scoped: ScopedFigures | None) -> ReplicaCard:
    """`scoped` holds the replica's figures over the default window, None when it reported nothing in it."""
    gauges = view.gauges
    used = None
    if gauges is not None and gauges.blocks_total:
        used = _observed(gauges.blocks_used / gauges.blocks_total, "ratio")
    return ReplicaCard(
        replica=view.replica,
        pool=view.pool,
        model=view.model,
        url=view.url,
        runs_on=" · ".join(filter(None, (view.ready.device, presenters.execution(view.ready)))) if view.ready else "",
        tone=views.tone(view.state),
        reason=view.state_reason,
        since=view.state_since,
        age=presenters.age(view.age_s),
        restarts=view.core_restarts,
        boot_epoch=view.boot_epoch,
        core_epoch=view.core_epoch,
        policy_epoch=view.policy_epoch,
        started_at=view.started_at,
        running=presenters.whole(_observed(gauges.running, "requests") if gauges else None),
        waiting=presenters.whole(_observed(gauges.waiting, "requests") if gauges else None),
        kv=presenters.percent(used),
        kv_text=f"{presenters.count(gauges.blocks_used)} of {presenters.count(gauges.blocks_total)} blocks"
        if gauges is not None and gauges.blocks_total
        else presenters.NONE,
        latencies=_latencies(scoped.figures) if scoped else (),
        facts=_facts(view),
    )


def _latencies(figures: Figures) -> tuple[tuple[str, QuantileRow], ...]:
    """Both sides beside each other."""
    return (
        ("TTFT engine", views.engine_row("TTFT", figures.engine_ttft)),
        ("TTFT gateway", views.gateway_row("TTFT", figures.ttft)),
        ("TPOT engine", views.engine_row("TPOT", figures.engine_tpot)),
        ("TPOT gateway", views.gateway_row("TPOT", figures.tpot)),
    )


def _observed(value: float, unit: str) -> Evidence:
    return Evidence(value=value, unit=unit, kind=EvidenceKind.OBSERVED, source="report")


def _facts(view: ReplicaView) -> tuple[tuple[str, str], ...]:
    ready = view.ready
    if ready is None:
        return ()
    return (
        ("Device", ready.device),
        ("Attention", ready.attention_backend or presenters.NONE),
        ("Forward", presenters.forward(ready) or presenters.NONE),
        ("Context", f"{presenters.count(ready.max_model_len)} tokens"),
        (
            "KV pool",
            f"{presenters.count(ready.total_blocks)} × {ready.block_size} tokens",
        ),
        ("KV memory", presenters.size(ready.kv_bytes)),
        ("Weights", f"{presenters.size(ready.weight_bytes)} {ready.weights}".rstrip()),
        ("Loaded in", f"{presenters.number(ready.load_seconds)} s"),
    )
