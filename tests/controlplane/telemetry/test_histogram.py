"""Quantiles state what they know: the exact one lies in the bucket, overflow is no number, milliseconds are not 0."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.evidence import EvidenceKind
from controlplane.telemetry.histogram import BUCKET_WIDTH, bucket_of, merged, quantile, quantiles
from dataplane.protocol import Histogram
from tests.controlplane.telemetry.reports import histogram

TOP = Histogram.upper_bound(Histogram.MAX_INDEX)
BOTTOM = Histogram.upper_bound(Histogram.MIN_INDEX)

seconds = st.floats(min_value=0.0, max_value=20_000.0) | st.floats(min_value=1e-5, max_value=30.0)


def exact(values: list[float], q: float) -> float:
    """The sample quantile by nearest rank."""
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1]


@given(st.lists(seconds, min_size=1, max_size=300), st.floats(min_value=0.001, max_value=1.0))
def test_f27_the_exact_sample_quantile_lies_in_the_reported_bucket(values: list[float], q: float) -> None:
    bucket = bucket_of(histogram(values), q)
    assert bucket is not None
    assert exact(values, q) in bucket


@given(st.lists(st.floats(min_value=1e-5, max_value=TOP), min_size=1, max_size=300), st.floats(0.001, 1.0))
def test_f27_the_value_is_within_its_own_stated_error_of_the_exact_quantile(values: list[float], q: float) -> None:
    found = quantile(histogram(values), q, source="test")
    assert found is not None and not found.above
    truth = exact(values, q)
    assert abs(found.value - truth) <= found.error * truth
    assert found.error == BUCKET_WIDTH < 0.0906


def test_f27_above_the_top_the_answer_is_more_than_never_a_number() -> None:
    found = quantile(histogram([0.1, TOP * 3]), 0.99, source="test")
    assert found is not None
    assert found.above and found.value == TOP
    half = quantile(histogram([0.1, TOP * 3]), 0.5, source="test")
    assert half is not None and not half.above


def test_f27_sub_second_values_are_not_zero() -> None:
    found = quantile(histogram([0.0008] * 3), 0.5, source="test")
    assert found is not None
    assert found.value == pytest.approx(0.0008, rel=BUCKET_WIDTH)
    zero = quantile(histogram([0.0]), 0.5, source="test")
    assert zero is not None and zero.value == BOTTOM and zero.error == 1.0


@given(st.lists(st.lists(seconds, max_size=40), max_size=6))
def test_quantiles_of_a_merge_equal_quantiles_of_all_values(parts: list[list[float]]) -> None:
    together = [value for part in parts for value in part]
    whole = quantiles(merged(histogram(part) for part in parts), source="test")
    assert whole == quantiles(histogram(together), source="test")
    assert whole.n == len(together)


def test_without_samples_there_is_no_figure() -> None:
    for empty in (None, Histogram()):
        assert quantiles(empty, source="test").p50 is None
    assert quantile(Histogram(), 0.5, source="test") is None


def test_a_quantile_is_observed_evidence_with_its_window_and_sample_count() -> None:
    found = quantiles(histogram([1.0, 2.0]), source="gateways", window_s=300.0).p95
    assert found is not None
    assert (found.kind, found.unit, found.source, found.window_s, found.n) == (
        EvidenceKind.OBSERVED, "s", "gateways", 300.0, 2,
    )  # fmt: skip


@pytest.mark.parametrize("q", [0.0, -0.5, 1.5, math.nan])
def test_a_quantile_outside_its_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        bucket_of(histogram([1.0]), q)
