"""The gate: what is faster than possible goes, with the reason; what is slow stays."""

from __future__ import annotations

import math

import pytest

from dataplane.hardware.costmodel import Ceilings, Op, Precision
from dataplane.hardware.datagate import (
    IN_CACHE,
    NOT_A_TIME,
    OVER_BANDWIDTH,
    OVER_BOTH,
    OVER_COMPUTE,
    Measured,
    calibrate,
    gate,
    ratios,
    violations,
)
from dataplane.hardware.figure import FigureKind

DEVICE = Ceilings({Precision.BF16: 1e12}, 1e10, FigureKind.CONFIGURED, "a round device")
HEAVY = Op("heavy", 1e12, 1e8)
WIDE = Op("wide", 1e9, 1e10)


def test_a_row_at_47_times_the_peak_is_dropped_and_named_and_an_honest_one_kept() -> None:
    gated = gate([Measured("published", 1 / 47, (HEAVY,)), Measured("honest", 1.6, (HEAVY,))], DEVICE)
    assert [row.label for row in gated.kept] == ["honest"]
    (dropped,) = gated.dropped
    assert dropped.label == "published"
    assert dropped.reason == OVER_COMPUTE
    assert dropped.ratio == pytest.approx(47)
    assert gated.reasons == {OVER_COMPUTE: 1}


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_dropped(seconds: float) -> None:
    assert gate([Measured("x", seconds, (HEAVY,))], DEVICE).dropped[0].reason == NOT_A_TIME


def test_beyond_the_bandwidth_a_row_lies_or_sat_in_the_cache() -> None:
    row = Measured("x", 0.9, (WIDE,))
    assert gate([row], DEVICE).dropped[0].reason == OVER_BANDWIDTH
    assert gate([row], DEVICE, cache_bytes=2e10).dropped[0].reason == IN_CACHE
    assert gate([Measured("x", 1.0, (WIDE,))], DEVICE).kept, "at the roofline is not beyond it"


def test_a_cache_excuses_no_flops() -> None:
    assert gate([Measured("x", 0.9, (HEAVY,))], DEVICE, cache_bytes=1e12).dropped[0].reason == OVER_COMPUTE


def test_operators_of_one_row_run_after_one_another() -> None:
    assert gate([Measured("x", 1.5, (HEAVY, WIDE))], DEVICE).dropped[0].reason == OVER_BOTH
    assert gate([Measured("x", 2.0, (HEAVY, WIDE))], DEVICE).kept


def test_an_assumption_is_compared_and_never_dropped_for() -> None:
    """A row may beat what the model expects of it without beating what is possible."""
    row = Measured("skewed routing", 0.5, least=(Op("few", 1e9, 1e9),), model=(WIDE,))
    gated = gate([row], DEVICE)
    assert gated.kept == (row,)
    assert ratios(gated.kept, DEVICE) == [pytest.approx(2.0)]


def test_violations_are_counted_without_the_gate() -> None:
    """One row above each ceiling and one without a time; half a device has too little for those at 62 %."""
    honest = [Measured("compute", 1.6, (HEAVY,)), Measured("memory", 1.6, (WIDE,)), Measured("slow", 4.0, (WIDE,))]
    false = [Measured("flops", 0.9, (HEAVY,)), Measured("bytes", 0.9, (WIDE,)), Measured("none", math.nan, (WIDE,))]
    assert violations([*honest, *false], DEVICE) == 3
    kept = gate([*honest, *false], DEVICE).kept
    assert [row.label for row in kept] == ["compute", "memory", "slow"]
    assert violations(kept, DEVICE) == 0
    assert violations(kept, DEVICE.halved()) == 2


def test_a_calibration_finds_what_is_reached_and_scores_it_on_other_rows() -> None:
    def row(op: Op) -> Measured:
        seconds = max(DEVICE.compute_s(op) / 0.6, DEVICE.memory_s(op) / 0.8) + 1e-5
        return Measured(op.name, seconds, (op,))

    rows = [row(Op("c", 1e11 * i, 1e6)) for i in range(1, 9)]
    rows += [row(Op("m", 1e6, 1e9 * i)) for i in range(1, 9)]
    rows += [row(Op("t", 1e3 * i, 1e3)) for i in range(1, 9)]
    found = calibrate(rows, DEVICE)
    assert found.flops_share == pytest.approx(0.6, rel=1e-3)
    assert found.bandwidth_share == pytest.approx(0.8, rel=1e-3)
    assert found.launch_s == pytest.approx(1e-5, rel=0.02)
    assert found.error < 0.01
    assert found.n == 12


def test_a_calibration_without_held_out_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two rows"):
        calibrate([Measured("x", 1.0, (HEAVY,))], DEVICE)
