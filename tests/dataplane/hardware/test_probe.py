"""The probe: its ceilings bound its own operators, and what it finds is observed on this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dataplane.hardware import probe as probing
from dataplane.hardware.costmodel import Precision
from dataplane.hardware.datasheets import DataSheet
from dataplane.hardware.figure import FigureKind
from dataplane.hardware.probe import OperatorTimer, probe


@pytest.fixture(scope="module")
def sheet() -> DataSheet:
    return probe(1, seconds=0.1)


def test_ceilings_are_observed_and_plausible(sheet: DataSheet) -> None:
    figures = [sheet.bandwidth, *sheet.flops.values()]
    assert all(figure.kind is FigureKind.OBSERVED and figure.n and figure.n >= 8 for figure in figures)
    assert 1e8 < sheet.bandwidth.value < 1e12
    assert 1e8 < sheet.flops[Precision.FP32].value < 1e13
    assert probing.cpu_name() in sheet.name


def test_operators_take_a_time_and_carry_the_work_of_their_shape() -> None:
    timer = OperatorTimer(threads=1, repeats=3)
    linear = timer.linear(4, 256, 512)
    assert linear.seconds > 0
    assert linear.least[0].flops == 2 * 4 * 256 * 512
    assert linear.least[0].bytes == 4 * (256 * 512 + 4 * 256 + 4 * 512)
    decode = timer.decode(2, 64, (4, 2, 16))
    assert decode.least[0].flops == 4 * 4 * 16 * 2 * 64
    prefill = timer.prefill(32, (4, 2, 16))
    assert prefill.least[0].flops == 4 * 4 * 16 * 32 * 33 / 2
    assert {row.least[0].precision for row in (linear, decode, prefill)} == {Precision.FP32}


def test_the_threads_are_as_many_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    with probing.torch_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_the_rest_of_the_cost_model_needs_no_torch() -> None:
    modules = ("costmodel", "datagate", "datasheets", "figure", "geometry", "hit_area", "stepmodel")
    names = ", ".join(f"dataplane.hardware.{name}" for name in modules)
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys, {names}; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "False"
