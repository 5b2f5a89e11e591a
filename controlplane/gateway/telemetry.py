"""What this gateway counted, in aligned windows, until the control plane has stored it.

Layer: service. Pure but for the wall clock passed in. A window is sent whole again while it grows and replaces what
the receiver holds, so a repeat never counts twice (contract of `GatewayReport`). Memory is bounded: during a long
outage the oldest windows are merged, never dropped. It must never hold a client's text: series are named by tenant,
pool and replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from controlplane.gateway.record import Outcome, RequestRecord
from dataplane.protocol import (
    LATEST_REFUSED,
    WINDOW_SECONDS,
    GatewayCounters,
    GatewayRefusals,
    GatewaySeries,
    GatewayWindow,
    Histogram,
    RefusedRequest,
)

MAX_WINDOWS = 360
WINDOWS_PER_REPORT = 30
MAX_SERIES = 4096
"""Series of one window; tenants beyond it are counted together as `OTHER`."""
MAX_REFUSALS = 512
"""Tenants and reasons of refusals of one window; what is beyond is in the series alone."""
MAX_LIMITS = 32
"""Reasons of one tenant in one window that name their limit; what is beyond is counted by its code."""
EXPLAINED_S = 30
"""How long a window keeps the refused requests themselves when nobody takes it; their counts stay."""
OTHER = "(other tenants)"
STRANGERS = "(no usable key)"
"""Stands for the tenant of requests without a usable key. No slug can read like either."""

Key = tuple[str, str, str]
Reason = tuple[str, str, str]
"""Tenant, code and the id of the limit in the way."""


class _Window:
    """`version` grows with every count; `acknowledged` is the one the receiver has certainly stored."""

    __slots__ = ("acknowledged", "doubtful", "explained", "refusals", "series", "version")

    def __init__(self) -> None:
        self.series: dict[Key, GatewayCounters] = {}
        self.refusals: dict[Reason, GatewayRefusals] = {}
        self.explained: dict[str, int] = {}
        """Reasons by tenant, as long as the refused requests themselves are kept."""
        self.version = 0
        self.acknowledged = 0
        self.doubtful = False
        """A report with it got no answer: the receiver may have stored it or not."""


class Recorder:
    """Counts requests. The reporter calls `pending`, then exactly one of `acknowledge`, `doubt` and `refused`."""

    def __init__(self, *, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._windows: dict[int, _Window] = {}
        self._reporting: frozenset[int] = frozenset()
        """Windows of the report in flight."""

    def accept(self, record: RequestRecord) -> None:
        """A replica has taken the request, or it ended without one otherwise than refused."""
        if not record.accepted_counted:
            record.accepted_counted = True
            self._count(record).accepted += 1

    def first_tokens(self, record: RequestRecord) -> None:
        """The record has learned its TTFT, of any token or of the first visible one."""
        if record.ttft_s is not None and not record.ttft_counted:
            record.ttft_counted = True
            counters = self._count(record)
            counters.ttft = counters.ttft or Histogram()
            counters.ttft.record(record.ttft_s)
        if record.ttft_visible_s is not None and not record.ttft_visible_counted:
            record.ttft_visible_counted = True
            counters = self._count(record)
            counters.ttft_visible = counters.ttft_visible or Histogram()
            counters.ttft_visible.record(record.ttft_visible_s)

    def end(self, record: RequestRecord) -> None:
        """A request has ended."""
        if record.outcome is not Outcome.REFUSED:
            self.accept(record)
        self.first_tokens(record)
        counters = self._count(record)
        match record.outcome:
            case Outcome.FINISHED:
                _add(counters.finished, record.reason)
                counters.e2e = counters.e2e or Histogram()
                counters.e2e.record(record.e2e_s)
            case Outcome.REFUSED:
                _add(counters.refused, record.reason)
                self._explain(record)
            case Outcome.FAILED:
                _add(counters.failed, record.reason)
            case Outcome.CANCELLED:
                counters.cancelled += 1
            case None:
                raise ValueError("the request has no outcome")
        counters.prompt_tokens += record.prompt_tokens
        counters.cached_tokens += record.cached_tokens
        counters.output_tokens += record.output_tokens
        if record.tpot_s is not None:
            counters.tpot = counters.tpot or Histogram()
            counters.tpot.record(record.tpot_s)
        if record.itl is not None:
            counters.itl = counters.itl or Histogram()
            counters.itl.merge(record.itl)

    def forged(self, tenant: str, headers: int) -> None:
        """A request of `tenant` (empty: without a usable key) brought so many headers that only insiders send."""
        self._counters((tenant or STRANGERS, "", "")).forged += headers

    def pending(self) -> tuple[list[GatewayWindow], dict[int, int]]:
        """The oldest windows with something unacknowledged, and the versions to acknowledge them by."""
        windows: list[GatewayWindow] = []
        versions: dict[int, int] = {}
        for start in sorted(self._windows):
            window = self._windows[start]
            if window.version == window.acknowledged:
                continue
            if len(windows) == WINDOWS_PER_REPORT:
                break
            series = [
                GatewaySeries(tenant=tenant, pool=pool, replica=replica, counters=counters)
                for (tenant, pool, replica), counters in window.series.items()
            ]
            refusals = list(window.refusals.values())
            windows.append(GatewayWindow(start=start, series=series, refusals=refusals))
            versions[start] = window.version
        self._reporting = frozenset(versions)
        return windows, versions

    def acknowledge(self, versions: dict[int, int]) -> None:
        """The receiver has stored these windows; those that are over and unchanged are forgotten."""
        self._reporting = frozenset()
        current = self._start()
        for start, version in versions.items():
            window = self._windows[start]
            window.acknowledged = version
            if window.version == version and start < current:
                del self._windows[start]

    def doubt(self, versions: dict[int, int]) -> None:
        """No answer came: the receiver may have stored these windows or not."""
        self._reporting = frozenset()
        for start in versions:
            self._windows[start].doubtful = True

    def refused(self) -> None:
        """The receiver has certainly not stored the report."""
        self._reporting = frozenset()

    def resend_all(self) -> None:
        """The receiver asked for everything again."""
        for window in self._windows.values():
            window.acknowledged = 0

    @property
    def windows(self) -> int:
        """Windows held."""
        return len(self._windows)

    def _count(self, record: RequestRecord) -> GatewayCounters:
        return self._counters((record.tenant or STRANGERS, record.pool, record.replica))

    def _explain(self, record: RequestRecord) -> None:
        """Keep for its tenant why a request was refused, in the window it was just counted in."""
        if record.grant is None:
            return
        window = self._window()
        quota_id, kind = record.refused_quota, record.refused_kind
        if (record.tenant, record.reason, quota_id) not in window.refusals:
            if len(window.refusals) >= MAX_REFUSALS:
                return
            if window.explained.get(record.tenant, 0) >= MAX_LIMITS:
                quota_id = ""
        reason = (record.tenant, record.reason, quota_id)
        found = window.refusals.get(reason)
        if found is None:
            window.explained[record.tenant] = window.explained.get(record.tenant, 0) + 1
            found = window.refusals[reason] = GatewayRefusals(
                tenant=record.tenant, code=record.reason, quota_id=quota_id, kind=kind
            )
        found.count += 1
        told = RefusedRequest(
            at=record.at, request_id=record.request_id, key_id=record.key_id, message=record.refused_message
        )
        found.latest = [*found.latest[1 - LATEST_REFUSED :], told]

    def _counters(self, key: Key) -> GatewayCounters:
        window = self._window()
        counters = window.series.get(key)
        if counters is None:
            if len(window.series) >= MAX_SERIES:
                key = (OTHER, "", "")
            counters = window.series.setdefault(key, GatewayCounters())
        return counters

    def _window(self) -> _Window:
        """The window of now, about to be counted into."""
        start = self._start()
        window = self._windows.get(start)
        if window is None:
            window = self._windows[start] = _Window()
            self._shorten(start - EXPLAINED_S)
            if len(self._windows) > MAX_WINDOWS:
                self._merge_oldest()
        window.version += 1
        return window

    def _shorten(self, before: int) -> None:
        """Forget the refused requests of windows that nobody took for long."""
        for start, window in self._windows.items():
            if start < before and window.explained:
                window.explained = {}
                for refusals in window.refusals.values():
                    refusals.latest = []

    def _merge_oldest(self) -> None:
        """Fold the two oldest windows that were certainly never stored into the earlier one."""
        never = sorted(
            start
            for start, window in self._windows.items()
            if not (window.doubtful or window.acknowledged or start in self._reporting)
        )
        if len(never) < 3:  # the newest is being counted into
            return
        kept, gone = self._windows[never[0]], self._windows.pop(never[1])
        for key, counters in gone.series.items():
            if key in kept.series:
                kept.series[key].merge(counters)
            else:
                kept.series[key] = counters
        for reason, refusals in gone.refusals.items():
            if (held := kept.refusals.get(reason)) is not None:
                held.count += refusals.count
                held.latest = [*held.latest, *refusals.latest][-LATEST_REFUSED:]
            elif len(kept.refusals) < MAX_REFUSALS:
                kept.refusals[reason] = refusals
        kept.version += gone.version

    def _start(self) -> int:
        return int(self._wall()) // WINDOW_SECONDS * WINDOW_SECONDS


def _add(counts: dict[str, int], reason: str) -> None:
    counts[reason] = counts.get(reason, 0) + 1
