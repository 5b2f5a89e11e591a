"""How numbers read on a page.

Layer: service. Pure functions from a figure to the text, unit and hint a template shows. They never query and
never turn an unknown figure into 0: unknown reads "—", a value above the histogram reads ">4,096 s" (F27).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from controlplane.evidence import Evidence
from controlplane.telemetry.schemas import Quantiles
from dataplane.protocol import CoreReady

NONE = "—"
MICRO = 1_000_000
"""Micro-units of money in one unit."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number as shown: `text` and `unit` apart so that units can be set smaller.

    `kind` is the evidence kind ("" when unknown), `note` the bucket error ("±9 %"), `n` the sample count text,
    `value` the raw number for meters and sorting (None when unknown).
    """

    text: str = NONE
    unit: str = ""
    kind: str = ""
    note: str = ""
    n: str = ""
    value: float | None = None

    @property
    def known(self) -> bool:
        return self.value is not None

    def __str__(self) -> str:
        return f"{self.text} {self.unit}" if self.unit else self.text


UNKNOWN = Figure()


@dataclass(frozen=True, slots=True)
class QuantileRow:
    """One line of a quantile table: three quantiles of one histogram and how many samples stand behind them."""

    label: str
    side: str
    hint: str
    p50: Figure
    p95: Figure
    p99: Figure
    n: str


def forward(ready: CoreReady) -> str:
    """How a core runs its steps, and by which instruction set if by kernels of its own; empty if it is silent."""
    return " on ".join(filter(None, (ready.forward, ready.kernel_tier)))


def execution(ready: CoreReady | None) -> str:
    """By which forward a core runs its steps and in which numbers it keeps its weights; empty if it is silent."""
    if ready is None:
        return ""
    return " · ".join(filter(None, (forward(ready), ready.weights and f"weights in {ready.weights}")))


def number(value: float) -> str:
    """Three significant digits below 1,000, thousands separators above; tiny positives read "<0.01"."""
    magnitude = abs(value)
    if magnitude >= 999.5:
        return f"{value:,.0f}"
    if magnitude >= 99.95:
        return f"{value:.0f}"
    if magnitude >= 9.995:
        return f"{value:.1f}"
    if magnitude == 0.0:
        return "0"
    return "<0.01" if magnitude < 0.005 else f"{value:.2f}"


def count(value: int) -> str:
    """An exact count with thousands separators; from a million on in millions with one decimal."""
    return f"{value / 1e6:,.1f} M" if abs(value) >= 1_000_000 else f"{value:,}"


def duration_parts(seconds: float) -> tuple[str, str]:
    """Text and unit: milliseconds below one second, seconds above. Positive values never read as 0."""
    if seconds < 0.9995:
        return number(seconds * 1000.0), "ms"
    return number(seconds), "s"


def duration(evidence: Evidence | None) -> Figure:
    """A latency in seconds as ms or s; above the histogram's top it reads ">4,096 s"."""
    if evidence is None or not math.isfinite(evidence.value):
        return UNKNOWN
    text, unit = duration_parts(evidence.value)
    if evidence.above:
        text = f">{text.removeprefix('<')}"
    return _figure(evidence, text, unit)


def rate(evidence: Evidence | None, unit: str = "/s") -> Figure:
    """A rate per second."""
    if evidence is None or not math.isfinite(evidence.value):
        return UNKNOWN
    return _figure(evidence, number(evidence.value), unit)


def percent(evidence: Evidence | None) -> Figure:
    """A ratio in 0..1 as per cent with one decimal below 100; a positive ratio never reads 0."""
    if evidence is None or not math.isfinite(evidence.value):
        return UNKNOWN
    return _figure(evidence, percent_text(evidence.value), "%")


def percent_text(ratio: float) -> str:
    """`ratio` in 0..1 without its sign: "71.3", "0", "<0.1", ">99.9"; only an exact 1 reads "100"."""
    value = ratio * 100.0
    if 0.0 < value < 0.05:
        return "<0.1"
    if 99.95 <= value < 100.0:
        return ">99.9"
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def whole(evidence: Evidence | None) -> Figure:
    """A gauge such as running requests; averages over a window keep one decimal."""
    if evidence is None or not math.isfinite(evidence.value):
        return UNKNOWN
    value = evidence.value
    text = f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
    return _figure(evidence, "<0.1" if text == "0.0" else text, "")


def _figure(evidence: Evidence, text: str, unit: str) -> Figure:
    return Figure(
        text=text,
        unit=unit,
        kind=str(evidence.kind),
        note=_within(evidence.error) if evidence.error > 0 else "",
        n=count(evidence.n) if evidence.n is not None else "",
        value=evidence.value,
    )


def quantile_row(label: str, quantiles: Quantiles, *, side: str, hint: str) -> QuantileRow:
    """`side` is "gateway" or "engine"; the two are shown under each other and never averaged."""
    return QuantileRow(
        label=label,
        side=side,
        hint=hint,
        p50=duration(quantiles.p50),
        p95=duration(quantiles.p95),
        p99=duration(quantiles.p99),
        n=count(quantiles.n),
    )


def bucket_error(*quantiles: Quantiles) -> str:
    """The largest bucket error among the quantiles, "±9 %", or "" when there are none."""
    errors = [
        evidence.error
        for each in quantiles
        for evidence in (each.p50, each.p95, each.p99)
        if evidence is not None and not evidence.above
    ]
    return _within(max(errors)) if errors and max(errors) > 0 else ""


def _within(error: float) -> str:
    """A bucket's width, 0.0905, as "±9 %"; rounding hides nothing, a quantile is shown as its bucket's middle."""
    return f"±{max(round(error * 100), 1)} %"


def window_label(seconds: int) -> str:
    """60 → "1 min", 3600 → "1 h"."""
    if seconds % 3600 == 0:
        return f"{seconds // 3600} h"
    if seconds % 60 == 0:
        return f"{seconds // 60} min"
    return f"{seconds} s"


def age(seconds: float | None) -> str:
    """How long ago, in the largest whole unit: "3 s", "2 min", "5 h", "9 d"; "—" when it never happened."""
    if seconds is None:
        return NONE
    seconds = max(0.0, seconds)
    for limit, size, unit in ((60.0, 1, "s"), (3600.0, 60, "min"), (86400.0, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds // 86400)} d"


def size(value: int | None) -> str:
    """Bytes in binary units: "138 MiB"; None and 0 read "—", because a model or pool of no bytes is not known."""
    if not value:
        return NONE
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1023.5:
            return f"{number(amount)} {unit}"
        amount /= 1024.0
    return f"{number(amount)} TiB"


def money(cost: int) -> str:
    """Micro-units as units with six decimals."""
    return f"{cost // MICRO:,}.{cost % MICRO:06d}"


def iso(at: float) -> str:
    """Unix seconds as an ISO 8601 timestamp in UTC, for `<time datetime>`."""
    return datetime.fromtimestamp(at, tz=UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def clock(at: float) -> str:
    """Unix seconds as "14:03:05 UTC"; the browser rewrites it into local time."""
    return datetime.fromtimestamp(at, tz=UTC).strftime("%H:%M:%S UTC")


def day(at: float) -> str:
    """Unix seconds as "2026-03-05 14:03 UTC"; the browser rewrites it into local time."""
    return datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
