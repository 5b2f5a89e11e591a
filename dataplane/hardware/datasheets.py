"""What the makers say their devices can do, and where they say it.

Layer: hardware. Pure. FLOP/s are dense: sheets that print sparse numbers only are halved, and say so. A CPU has no
useful sheet: `dataplane.hardware.probe` measures one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dataplane.hardware.costmodel import Ceilings, Format, Precision, critical_batch
from dataplane.hardware.figure import Figure, FigureKind


@dataclass(frozen=True, slots=True)
class DataSheet:
    """One device. `cache_bytes` is its last cache, None where we found no source."""

    name: str
    flops: Mapping[Precision, Figure]
    bandwidth: Figure
    memory: Figure
    cache: Figure | None = None

    @property
    def cache_bytes(self) -> float:
        """0 where it is not known."""
        return self.cache.value if self.cache is not None else 0.0

    def ceilings(self) -> Ceilings:
        """For the cost model."""
        return Ceilings(
            flops={precision: figure.value for precision, figure in self.flops.items()},
            bandwidth=self.bandwidth.value,
            kind=self.bandwidth.kind,
            source=self.name,
        )

    def critical_batch(self, precision: Precision, weights: Format) -> Figure:
        value = critical_batch(self.ceilings(), precision, weights)
        return Figure(value, "tokens", self.bandwidth.kind, f"F·b_w/(2·W) of {self.name}")


def _figure(value: float, unit: str, source: str) -> Figure:
    return Figure(value, unit, FigureKind.CONFIGURED, source)


def _sheet(
    name: str,
    source: str,
    *,
    tera: Mapping[Precision, float],
    bandwidth: float,
    memory: float,
    cache: tuple[float, str] | None = None,
    note: str = "",
) -> DataSheet:
    """`tera` in TFLOP/s, `bandwidth` in GB/s, `memory` in GB, all as the makers count: powers of ten."""
    flops_source = f"{source}; {note}" if note else source
    return DataSheet(
        name=name,
        flops={precision: _figure(value * 1e12, "FLOP/s", flops_source) for precision, value in tera.items()},
        bandwidth=_figure(bandwidth * 1e9, "B/s", source),
        memory=_figure(memory * 1e9, "B", source),
        cache=_figure(cache[0] * 2**20, "B", cache[1]) if cache else None,
    )


_SPARSE = "printed with 2:4 sparsity, halved"

A100 = _sheet(
    "A100 SXM 80 GB",
    "NVIDIA A100 datasheet (2021)",
    tera={Precision.BF16: 312, Precision.INT8: 624},
    bandwidth=2039,
    memory=80,
    cache=(40, "NVIDIA A100 architecture whitepaper"),
)
H100 = _sheet(
    "H100 SXM 80 GB",
    "NVIDIA H100 datasheet (2023)",
    tera={Precision.BF16: 989, Precision.FP8: 1979, Precision.INT8: 1979},
    bandwidth=3350,
    memory=80,
    cache=(50, "NVIDIA H100 architecture whitepaper"),
    note=_SPARSE,
)
H200 = _sheet(
    "H200 SXM 141 GB",
    "NVIDIA H200 datasheet (2024)",
    tera={Precision.BF16: 989, Precision.FP8: 1979, Precision.INT8: 1979},
    bandwidth=4800,
    memory=141,
    cache=(50, "NVIDIA H100 architecture whitepaper: the same die"),
    note=_SPARSE,
)
B200 = _sheet(
    "B200 180 GB",
    "NVIDIA Blackwell datasheet (2025), column HGX B200",
    tera={Precision.BF16: 2250, Precision.FP8: 4500, Precision.INT8: 4500},
    bandwidth=7700,
    memory=180,
    note=_SPARSE,
)
MI300X = _sheet(
    "MI300X 192 GB",
    "AMD Instinct MI300X data sheet (2023)",
    tera={Precision.BF16: 1307.4, Precision.FP8: 2614.9, Precision.INT8: 2614.9},
    bandwidth=5300,
    memory=192,
    cache=(256, "ROCm documentation, AMD GPU specifications: L3"),
)
L40S = _sheet(
    "L40S 48 GB",
    "NVIDIA L40S datasheet (2023)",
    tera={Precision.BF16: 362.05, Precision.FP8: 733, Precision.INT8: 733},
    bandwidth=864,
    memory=48,
)
SHEETS = (A100, H100, H200, B200, MI300X, L40S)
