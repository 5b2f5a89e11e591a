"""How numbers read: units, dashes, ">X", never 0 for what is not known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.console import presenters
from controlplane.evidence import Evidence, EvidenceKind
from controlplane.telemetry.histogram import BUCKET_WIDTH
from controlplane.telemetry.schemas import Quantiles


def observed(value: float, **rest: object) -> Evidence:
    return Evidence(value=value, unit="s", kind=EvidenceKind.OBSERVED, source="test", **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0000004, "<0.01 ms"),
        (0.00042, "0.42 ms"),
        (0.0312, "31.2 ms"),
        (0.4123, "412 ms"),
        (0.99949, "999 ms"),
        (0.99951, "1.00 s"),
        (1.234, "1.23 s"),
        (12.34, "12.3 s"),
        (123.4, "123 s"),
        (4096.0, "4,096 s"),
    ],
)
def test_durations_have_three_digits_and_the_unit_that_fits(seconds: float, text: str) -> None:
    assert str(presenters.duration(observed(seconds))) == text


def test_f27_above_the_histogram_is_never_a_number() -> None:
    figure = presenters.duration(observed(4096.0, above=True))
    assert str(figure) == ">4,096 s"


@pytest.mark.parametrize("show", [presenters.duration, presenters.rate, presenters.percent, presenters.whole])
def test_unknown_is_a_dash_not_zero(show: object) -> None:
    for nothing in (None, observed(math.nan), observed(math.inf)):
        figure = show(nothing)  # type: ignore[operator]
        assert figure.text == "—"
        assert not figure.known
        assert figure.unit == ""


@given(st.floats(min_value=1e-9, max_value=4e3))
def test_f27_something_never_reads_as_nothing(value: float) -> None:
    for figure in (
        presenters.duration(observed(value)),
        presenters.rate(observed(value)),
        presenters.whole(observed(value)),
    ):
        assert figure.text.strip("<").replace(",", "") not in {"0", "0.0", "0.00"}, value


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.0, "0"), (0.0001, "<0.1"), (0.0123, "1.2"), (0.7134, "71.3"), (0.99996, ">99.9"), (1.0, "100")],
)
def test_percent_reaches_0_and_100_only_when_exact(ratio: float, text: str) -> None:
    assert presenters.percent_text(ratio) == text


def test_a_figure_carries_its_kind_sample_count_and_bucket_error() -> None:
    figure = presenters.duration(observed(0.2, n=12345, error=BUCKET_WIDTH))
    assert (figure.kind, figure.n, figure.note) == ("observed", "12,345", "±9 %")


def test_counts_and_ages_and_sizes() -> None:
    assert presenters.count(0) == "0"
    assert presenters.count(12_345) == "12,345"
    assert presenters.count(1_250_000) == "1.2 M"
    assert [presenters.age(s) for s in (None, 0.4, 59.9, 60, 3599, 7200, 200_000)] == [
        "—", "0 s", "59 s", "1 min", "59 min", "2 h", "2 d",
    ]  # fmt: skip
    assert [presenters.size(b) for b in (None, 0, 512, 138 << 20)] == ["—", "—", "512 B", "138 MiB"]
    assert [presenters.window_label(s) for s in (60, 300, 900, 3600)] == ["1 min", "5 min", "15 min", "1 h"]


def test_a_quantile_row_without_samples_says_so() -> None:
    row = presenters.quantile_row("TTFT", Quantiles(n=0), side="gateway", hint="")
    assert (row.p50.text, row.p95.text, row.p99.text, row.n) == ("—", "—", "—", "0")


def test_the_bucket_error_leaves_out_what_lies_above_the_buckets() -> None:
    known = Quantiles(n=2, p50=observed(0.1, error=BUCKET_WIDTH), p99=observed(4096.0, above=True, error=9.0))
    assert presenters.bucket_error(known) == "±9 %"
    assert presenters.bucket_error(Quantiles(n=0)) == ""
