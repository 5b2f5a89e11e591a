"""The replica's counters, cut into aligned windows and kept until acknowledged.

Layer: service. Pure: every call takes the time; no I/O. Owns which windows exist, which changed since they
were last acknowledged and what a report carries. The receiver replaces a window by its newer version, so
totals are right whatever gets lost or repeated; therefore a window that was ever put into a report keeps its
start, and only windows that never left are merged when there are too many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dataplane.protocol import WINDOW_SECONDS, Counters, Gauges, Window

UNACKNOWLEDGED_LIMIT = 360
ACKNOWLEDGED_KEPT = 24
PER_REPORT = 30
SAMPLED_GAUGES = (
    "running",
    "waiting",
    "blocks_total",
    "blocks_used",
    "blocks_cached",
    "blocks_free",
    "kv_slots_empty",
    "credits",
)
"""Fields of `Gauges` that are sampled into windows."""


@dataclass(slots=True)
class _Slot:
    """One window and what the receiver has of it. `version` grows with every change."""

    start: int
    spans: int = 1
    counters: Counters = field(default_factory=Counters)
    gauge_sums: dict[str, float] = field(default_factory=dict)
    gauge_max: dict[str, float] = field(default_factory=dict)
    gauge_samples: int = 0
    version: int = 1
    acknowledged: int = 0
    sent: bool = False

    @property
    def changed(self) -> bool:
        return self.version > self.acknowledged

    def absorb(self, later: _Slot) -> None:
        """Take over the window after this one; its start stays, its span grows."""
        self.spans += later.spans
        self.counters.merge(later.counters)
        for name, value in later.gauge_sums.items():
            self.gauge_sums[name] = self.gauge_sums.get(name, 0.0) + value
        for name, value in later.gauge_max.items():
            self.gauge_max[name] = max(self.gauge_max.get(name, -math.inf), value)
        self.gauge_samples += later.gauge_samples
        self.version += 1

    def window(self) -> Window:
        """A view for encoding at once: it shares the live counters."""
        return Window(
            start=self.start,
            counters=self.counters,
            gauge_sums=self.gauge_sums,
            gauge_max=self.gauge_max,
            gauge_samples=self.gauge_samples,
        )


@dataclass(frozen=True, slots=True)
class Packet:
    """The windows of one report and, for the acknowledgement, the version each had when it was packed."""

    windows: list[Window]
    versions: dict[int, int]
    full: bool


class WindowBook:
    """Windows of one boot, oldest first; the last one is open.

    At most `limit` windows wait for an acknowledgement: beyond it the neighbours that never left and
    together span least are merged, which keeps every total and gives up resolution. A resync brings back the last
    `kept` acknowledged windows on top.
    """

    def __init__(self, now: float, *, limit: int = UNACKNOWLEDGED_LIMIT, kept: int = ACKNOWLEDGED_KEPT) -> None:
        if limit <= PER_REPORT + 2:
            raise ValueError(f"limit must be above {PER_REPORT + 2}, got {limit}")
        self._limit = limit
        self._kept = kept
        self._slots: list[_Slot] = [_Slot(_aligned(now))]
        self._closed = Counters()
        self._full_due = True

    def counters(self, now: float) -> Counters:
        """The open window's counters, to add to in place right now."""
        slot = self._open(now)
        slot.version += 1
        return slot.counters

    def sample(self, now: float, gauges: Gauges) -> None:
        """Take one of the regular samples of the gauges, from which means are computed."""
        slot = self._open(now)
        slot.version += 1
        slot.gauge_samples += 1
        for name in SAMPLED_GAUGES:
            value = float(getattr(gauges, name))
            slot.gauge_sums[name] = slot.gauge_sums.get(name, 0.0) + value
        self._peak(slot, gauges)

    def peak(self, now: float, gauges: Gauges) -> None:
        """Keep the largest values; called for every state the core tells of, between samples."""
        slot = self._open(now)
        slot.version += 1
        self._peak(slot, gauges)

    def totals(self) -> Counters:
        """Everything counted since boot; never falls."""
        totals = self._closed.copy()
        totals.merge(self._slots[-1].counters)
        return totals

    def pack(self) -> Packet:
        """The oldest changed windows, at most `PER_REPORT`. `full` when they are all that is retained."""
        chosen = [slot for slot in self._slots if slot.changed][:PER_REPORT]
        for slot in chosen:
            slot.sent = True
        full = self._full_due and len(chosen) == len(self._slots)
        return Packet(
            windows=[slot.window() for slot in chosen],
            versions={slot.start: slot.version for slot in chosen},
            full=full,
        )

    def acknowledge(self, packet: Packet) -> None:
        """The receiver stored these versions. Old windows it has whole are forgotten, but for the last few."""
        for slot in self._slots:
            slot.acknowledged = max(slot.acknowledged, packet.versions.get(slot.start, 0))
        if packet.full:
            self._full_due = False
        done = [slot for slot in self._slots[:-1] if not slot.changed]
        dropped = {slot.start for slot in done[: max(0, len(done) - self._kept)]}
        if dropped:
            self._slots = [slot for slot in self._slots if slot.start not in dropped]

    def resync(self) -> None:
        """Send everything retained once more."""
        self._full_due = True
        for slot in self._slots:
            slot.acknowledged = 0

    @property
    def waiting(self) -> int:
        """Windows that have not been acknowledged as they are."""
        return sum(slot.changed for slot in self._slots)

    def _open(self, now: float) -> _Slot:
        last = self._slots[-1]
        start = _aligned(now)
        # A clock that was set back keeps adding to the open window: starts only grow.
        if start <= last.start:
            return last
        self._closed.merge(last.counters)
        self._slots.append(_Slot(start))
        if self.waiting > self._limit:
            self._merge_two()
        return self._slots[-1]

    def _merge_two(self) -> None:
        mergeable = [
            index
            for index in range(len(self._slots) - 2)
            if not (self._slots[index].sent or self._slots[index + 1].sent)
        ]
        if mergeable:
            index = min(mergeable, key=lambda i: self._slots[i].spans + self._slots[i + 1].spans)
            self._slots[index].absorb(self._slots.pop(index + 1))

    @staticmethod
    def _peak(slot: _Slot, gauges: Gauges) -> None:
        for name in SAMPLED_GAUGES:
            value = float(getattr(gauges, name))
            slot.gauge_max[name] = max(slot.gauge_max.get(name, -math.inf), value)


def _aligned(now: float) -> int:
    return int(now // WINDOW_SECONDS) * WINDOW_SECONDS
