"""From reports to rows, and from rows to coarser rows.

Layer: service. Pure: no I/O, no clock. A row replaces what was stored for its key when its sequence is newer; rows
of one resolution merge into the next by plain addition, so the order they came in never matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from controlplane.telemetry.validation import (
    RefusedError,
    check_gateway_window,
    check_series,
    check_window,
)
from dataplane.protocol import (
    WINDOW_SECONDS,
    GatewayCounters,
    GatewayReport,
    Report,
    Window,
    encode,
)

ENGINE = "engine"
GATEWAY = "gateway"


class WindowKey(NamedTuple):
    """The primary key of a window, but for its resolution."""

    start: int
    source: str
    instance: str = ""
    boot_epoch: int = 0
    pool: str = ""
    replica: str = ""
    tenant: str = ""


class WindowRow(NamedTuple):
    """One row to store: `data` is msgpack of `Window` (engine) or `GatewayCounters` (gateway)."""

    key: WindowKey
    sequence: int
    data: bytes


class Sorted(NamedTuple):
    """What of a report may be stored, and the reasons why the rest may not."""

    rows: list[WindowRow]
    refused: list[str]


def engine_rows(report: Report, now: float) -> Sorted:
    """One row per window of a replica's report."""
    rows, refused = [], []
    for window in report.windows:
        try:
            check_window(window, now)
        except RefusedError as error:
            refused.append(f"window {window.start}: {error}")
            continue
        key = WindowKey(window.start, ENGINE, report.replica, report.boot_epoch, report.pool, report.replica)
        rows.append(WindowRow(key, report.sequence, encode(window)))
    return Sorted(rows, refused)


def gateway_rows(report: GatewayReport, now: float) -> Sorted:
    """One row per window, tenant, pool and replica of a gateway's report, and one that says it was there just now.

    The latter tells a quiet gateway from an absent one: without it "no requests" and "no data" look alike.
    """
    start = int(now) // WINDOW_SECONDS * WINDOW_SECONDS
    present = WindowKey(start, GATEWAY, report.gateway, report.boot_epoch)
    rows, refused = [WindowRow(present, report.sequence, encode(GatewayCounters()))], []
    for window in report.windows:
        try:
            check_gateway_window(window, now)
        except RefusedError as error:
            refused.append(f"window {window.start}: {error}")
            continue
        for series in window.series:
            try:
                check_series(series)
            except RefusedError as error:
                refused.append(f"window {window.start}, tenant {series.tenant[:40]!r}: {error}")
                continue
            key = WindowKey(
                window.start,
                GATEWAY,
                report.gateway,
                report.boot_epoch,
                series.pool,
                series.replica,
                series.tenant,
            )
            rows.append(WindowRow(key, report.sequence, encode(series.counters)))
    return Sorted(rows, refused)


def newest(rows: Iterable[WindowRow]) -> list[WindowRow]:
    """One row per key, that of the highest sequence, in key order (the order rows are locked in)."""
    best: dict[WindowKey, WindowRow] = {}
    for row in rows:
        held = best.get(row.key)
        if held is None or held.sequence < row.sequence:
            best[row.key] = row
    return [best[key] for key in sorted(best)]


def aligned(start: int, resolution: int) -> int:
    """The start of the window of `resolution` that holds `start`."""
    return start // resolution * resolution


_decode_window = msgspec.msgpack.Decoder(Window).decode
_decode_gateway = msgspec.msgpack.Decoder(GatewayCounters).decode


def roll_up(
    rows: Iterable[tuple[WindowKey, bytes]], *, start: int, source_resolution: int
) -> list[tuple[WindowKey, bytes]]:
    """Merge the rows of one coarser window that begins at `start`: one row per source, pool and tenant.

    Counters add. Gauges of replicas add up to their pool's: a rolled window's `gauge_sums` are sums over its
    10 s spans of the pool's mean in that span, and `gauge_samples` is the number of spans, so that sum ÷ samples is
    the pool's mean. `gauge_max` stays the highest that any one replica showed.
    """
    engines: dict[str, _PoolWindow] = {}
    gateways: dict[tuple[str, str], GatewayCounters] = {}
    for key, data in rows:
        if key.source == ENGINE:
            pool = engines.setdefault(key.pool, _PoolWindow())
            pool.add(key.start, _decode_window(data), rolled=source_resolution > WINDOW_SECONDS)
        else:
            gateways.setdefault((key.pool, key.tenant), GatewayCounters()).merge(_decode_gateway(data))
    rolled = [(WindowKey(start, ENGINE, pool=pool), encode(merged.window(start))) for pool, merged in engines.items()]
    rolled += [
        (WindowKey(start, GATEWAY, pool=pool, tenant=tenant), encode(counters))
        for (pool, tenant), counters in gateways.items()
    ]
    return sorted(rolled)


class _PoolWindow:
    """One pool's engine windows, being merged."""

    def __init__(self) -> None:
        self._counters = Window(start=0).counters
        self._sums: dict[str, float] = {}
        self._max: dict[str, float] = {}
        self._spans: dict[int, int] = {}

    def add(self, start: int, window: Window, *, rolled: bool) -> None:
        self._counters.merge(window.counters)
        spans = window.gauge_samples if rolled else min(1, window.gauge_samples)
        divisor = 1 if rolled else max(1, window.gauge_samples)
        self._spans[start] = max(self._spans.get(start, 0), spans)
        for name, value in window.gauge_sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value / divisor
        for name, value in window.gauge_max.items():
            self._max[name] = max(self._max.get(name, value), value)

    def window(self, start: int) -> Window:
        return Window(
            start=start,
            counters=self._counters,
            gauge_sums=self._sums,
            gauge_max=self._max,
            gauge_samples=sum(self._spans.values()),
        )
