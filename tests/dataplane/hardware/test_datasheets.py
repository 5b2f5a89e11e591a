"""Every number of a sheet has a source, and the reference values come out."""

from __future__ import annotations

import pytest

from dataplane.hardware.costmodel import BF16, Precision
from dataplane.hardware.datasheets import A100, H100, H200, SHEETS
from dataplane.hardware.figure import FigureKind


def test_the_critical_batch_of_an_h200_is_206_in_bf16() -> None:
    figure = H200.critical_batch(Precision.BF16, BF16)
    assert round(figure.value) == 206
    assert figure.kind is FigureKind.CONFIGURED
    assert "H200" in figure.source


def test_every_number_is_configured_and_says_where_it_is_printed() -> None:
    for sheet in SHEETS:
        numbers = [sheet.bandwidth, sheet.memory, *sheet.flops.values(), *([sheet.cache] if sheet.cache else [])]
        assert all(number.value > 0 and number.kind is FigureKind.CONFIGURED for number in numbers), sheet.name
        assert all("NVIDIA" in number.source or "AMD" in number.source for number in numbers), sheet.name
        assert Precision.BF16 in sheet.flops
        assert 50 < sheet.ceilings().peak(Precision.BF16) / sheet.bandwidth.value < 500, "a plausible ridge"


def test_the_names_are_the_six_devices() -> None:
    assert [sheet.name.split()[0] for sheet in SHEETS] == ["A100", "H100", "H200", "B200", "MI300X", "L40S"]


def test_h100_and_h200_differ_in_memory_alone() -> None:
    assert {p: f.value for p, f in H100.flops.items()} == {p: f.value for p, f in H200.flops.items()}
    assert H200.bandwidth.value / H100.bandwidth.value == pytest.approx(1.433, abs=0.001)


def test_a_device_without_fp8_says_so() -> None:
    with pytest.raises(LookupError, match="A100 SXM 80 GB gives no ceiling for fp8"):
        A100.critical_batch(Precision.FP8, BF16)
