"""From window rows to the figures and series of a page.

Layer: service. Pure: rows, live loads and the time in, figures with their evidence out. The gateways' view and the
engines' view are summed apart and never averaged together; what was not observed is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controlplane.evidence import Evidence, EvidenceKind
from controlplane.telemetry.histogram import quantiles
from controlplane.telemetry.schemas import Figures, Quantiles, Series
from controlplane.telemetry.scopes import Scope, decode_engine, decode_gateway
from controlplane.telemetry.windows import ENGINE, WindowKey
from controlplane.tenants.schemas import PROBE_TENANT
from dataplane.protocol import WINDOW_SECONDS, Histogram

GATEWAYS = "gateways"
ENGINES = "engines"
GAUGES = "replica gauges"
SHORTEST_SPAN_S = 1.0
"""Rates are over at least one report interval: a shorter span says nothing."""


class StoredWindow(NamedTuple):
    """A row as read: `recorded_at` is when it was last replaced (Unix seconds)."""

    key: WindowKey
    data: bytes
    recorded_at: float


class Load(NamedTuple):
    """One replica's gauges, now or as the mean of its newest window. `slots` are allocated, `empty` of them unused."""

    running: float
    waiting: float
    blocks_used: float
    blocks_total: float
    slots: float
    empty: float


@dataclass(slots=True)
class _Span:
    """One 10 s span: its sums, whether gateways reported, and the replicas' mean gauges."""

    scope: Scope = field(default_factory=Scope)
    gateway_until: float | None = None
    blocks_used: float = 0.0
    blocks_total: float = 0.0


class Tables:
    """The rows of one window of time, summed by span, replica and tenant.

    The window is the `window_s` seconds up to `now` in whole spans of `WINDOW_SECONDS`, the last of which is open.
    """

    def __init__(self, now: float, window_s: int) -> None:
        self.now = now
        self.last = int(now) // WINDOW_SECONDS * WINDOW_SECONDS
        self.first = self.last - (window_s // WINDOW_SECONDS - 1) * WINDOW_SECONDS
        self.replicas: dict[str, Scope] = {}
        self.tenants: dict[str, Scope] = {}
        self.latest: dict[str, tuple[int, dict[str, float]]] = {}
        """Of each replica the start and the mean gauges of its newest sampled window."""
        self._spans = {start: _Span() for start in range(self.first, self.last + 1, WINDOW_SECONDS)}

    def add(self, rows: Iterable[StoredWindow], *, tenant: str | None = None, replica: str | None = None) -> None:
        """Sum the rows of `tenant` and `replica` (all if None); a tenant has no engine rows. Canaries are no traffic:
        the probe tenant has its own line and, unless it is asked for, no part in the others.
        """
        for row in rows:
            span = self._spans.get(row.key.start)
            if span is None:
                continue
            if row.key.source == ENGINE:
                if tenant is None and replica in (None, row.key.replica):
                    self._add_engine(span, row)
            else:
                span.gateway_until = max(span.gateway_until or 0.0, row.recorded_at)
                if row.key.tenant and tenant in (None, row.key.tenant) and replica in (None, row.key.replica):
                    self._add_gateway(span, row, traffic=row.key.tenant != PROBE_TENANT or tenant == PROBE_TENANT)

    def _add_engine(self, span: _Span, row: StoredWindow) -> None:
        window = decode_engine(row.data)
        replica = row.key.replica
        span.scope.add_engine(window.counters)
        _scope(self.replicas, replica).add_engine(window.counters)
        if window.gauge_samples:
            means = {name: value / window.gauge_samples for name, value in window.gauge_sums.items()}
            span.blocks_used += means.get("blocks_used", 0.0)
            span.blocks_total += means.get("blocks_total", 0.0)
            if row.key.start >= self.latest.get(replica, (0, {}))[0]:
                self.latest[replica] = (row.key.start, means)

    def _add_gateway(self, span: _Span, row: StoredWindow, *, traffic: bool) -> None:
        counters = decode_gateway(row.data)
        _scope(self.tenants, row.key.tenant).add_gateway(counters)
        if not traffic:
            return
        span.scope.add_gateway(counters)
        if row.key.replica:
            _scope(self.replicas, row.key.replica).add_gateway(counters)

    def total(self) -> Scope:
        """Everything that was added."""
        total = Scope()
        for span in self._spans.values():
            total.add(span.scope)
        return total

    def covered_s(self) -> float | None:
        """Seconds from the first span in which a gateway reported, at the earliest the window's first, to the last
        report in the open span (or now). None when no gateway reported in the window."""
        reported = [start for start, span in self._spans.items() if span.gateway_until is not None]
        if not reported:
            return None
        return max(SHORTEST_SPAN_S, self.last + self._covered(self.last) - reported[0])

    def _covered(self, start: int) -> float:
        """Seconds of the span at `start` that reports have told of."""
        if start < self.last:
            return float(WINDOW_SECONDS)
        until = self._spans[start].gateway_until
        return self.now - start if until is None else min(max(until, start), self.now) - start

    def series(self) -> Series:
        """One point per span; None where nobody reported or nothing was measured."""
        points = [_point(span, max(SHORTEST_SPAN_S, self._covered(start))) for start, span in self._spans.items()]
        return Series(
            at=list(self._spans),
            **{name: [getattr(point, name) for point in points] for name in _Point._fields},
        )


def _scope(scopes: dict[str, Scope], key: str) -> Scope:
    found = scopes.get(key)
    if found is None:
        found = scopes[key] = Scope()
    return found


class _Point(NamedTuple):
    request_rate: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    tpot_p99: float | None
    prompt_rate: float | None
    output_rate: float | None
    kv_used: float | None
    prefix_hit: float | None


def _point(span: _Span, covered_s: float) -> _Point:
    gateway = span.scope
    present = span.gateway_until is not None
    ttft = quantiles(gateway.ttft, source=GATEWAYS)
    tpot = quantiles(gateway.tpot, source=GATEWAYS)
    return _Point(
        request_rate=gateway.accepted / covered_s if present else None,
        ttft_p50=_value(ttft.p50),
        ttft_p95=_value(ttft.p95),
        ttft_p99=_value(ttft.p99),
        tpot_p50=_value(tpot.p50),
        tpot_p95=_value(tpot.p95),
        tpot_p99=_value(tpot.p99),
        prompt_rate=gateway.prompt_tokens / covered_s if present else None,
        output_rate=gateway.output_tokens / covered_s if present else None,
        kv_used=span.blocks_used / span.blocks_total if span.blocks_total else None,
        prefix_hit=gateway.cached_tokens / gateway.prompt_tokens if gateway.prompt_tokens else None,
    )


def _value(evidence: Evidence | None) -> float | None:
    return None if evidence is None else evidence.value


def figures(scope: Scope, *, covered_s: float | None, window_s: float, loads: Sequence[Load]) -> Figures:
    """One scope's figures. `covered_s` is the span of its rates, `loads` those of its replicas that speak."""
    finished = sum(scope.finished.values())

    def of(histogram: Histogram, source: str) -> Quantiles:
        return quantiles(histogram, source=source, window_s=covered_s if source == GATEWAYS else window_s)

    return Figures(
        request_rate=_rate(scope.accepted, "requests/s", scope.accepted, covered_s),
        prompt_rate=_rate(scope.prompt_tokens, "tokens/s", finished, covered_s),
        output_rate=_rate(scope.output_tokens, "tokens/s", finished, covered_s),
        prefix_hit=_ratio(scope.cached_tokens, scope.prompt_tokens, GATEWAYS, finished, covered_s),
        ttft=of(scope.ttft, GATEWAYS),
        ttft_visible=of(scope.ttft_visible, GATEWAYS),
        tpot=of(scope.tpot, GATEWAYS),
        e2e=of(scope.e2e, GATEWAYS),
        engine_ttft=of(scope.engine_ttft, ENGINES),
        engine_tpot=of(scope.engine_tpot, ENGINES),
        engine_prefix_hit=_ratio(scope.prefix_hits, scope.prefix_queries, ENGINES, scope.prefix_queries, window_s),
        kv_used=_gauge_ratio(loads, "blocks_used", "blocks_total"),
        kv_waste=_gauge_ratio(loads, "empty", "slots"),
        running=_gauge_sum(loads, "running"),
        waiting=_gauge_sum(loads, "waiting"),
        accepted=scope.accepted,
        finished=scope.finished,
        refused=scope.refused,
        failed=scope.failed,
        cancelled=scope.cancelled,
        forged=scope.forged,
    )


def mean_load(means: Mapping[str, float], block_size: int) -> Load:
    """The load that a window's mean gauges tell of; for when live gauges cannot be had."""
    return Load(
        running=means.get("running", 0.0),
        waiting=means.get("waiting", 0.0),
        blocks_used=means.get("blocks_used", 0.0),
        blocks_total=means.get("blocks_total", 0.0),
        slots=means.get("blocks_used", 0.0) * block_size,
        empty=means.get("kv_slots_empty", 0.0),
    )


def _observed(value: float, unit: str, source: str, n: int, window_s: float | None) -> Evidence:
    return Evidence(value=value, unit=unit, kind=EvidenceKind.OBSERVED, source=source, n=n, window_s=window_s)


def _rate(count: int, unit: str, n: int, covered_s: float | None) -> Evidence | None:
    return None if covered_s is None else _observed(count / covered_s, unit, GATEWAYS, n, covered_s)


def _ratio(part: int, whole: int, source: str, n: int, window_s: float | None) -> Evidence | None:
    return _observed(part / whole, "ratio", source, n, window_s) if whole else None


def _gauge_ratio(loads: Sequence[Load], part: str, whole: str) -> Evidence | None:
    total = sum(getattr(load, whole) for load in loads)
    used = sum(getattr(load, part) for load in loads)
    return _observed(used / total, "ratio", GAUGES, len(loads), None) if total else None


def _gauge_sum(loads: Sequence[Load], name: str) -> Evidence | None:
    total = sum(getattr(load, name) for load in loads)
    return _observed(total, "requests", GAUGES, len(loads), None) if loads else None
