"""Ratios of pairs and the interval of their median, by hand and against simulation."""

from __future__ import annotations

import random
from statistics import median

import pytest

from dataplane.bench.engine.paired import order_statistics, quantile, ratio_of


def test_a_ratio_above_one_says_that_ours_is_better_whichever_way_the_figure_goes() -> None:
    assert ratio_of([20.0], [10.0], more_is_better=True).median == 2.0
    assert ratio_of([2.0], [1.0], more_is_better=False).median == 0.5


def test_pairs_are_compared_with_each_other_and_not_with_the_whole() -> None:
    """A machine that slows down by half halfway leaves every ratio at 2; medians of the sides would say else."""
    found = ratio_of([20, 20, 20, 10, 10, 8], [10, 10, 10, 5, 5, 4], more_is_better=True)
    assert (found.median, found.lower, found.upper) == (2.0, 2.0, 2.0)


def test_ten_pairs_have_the_second_smallest_and_the_second_greatest() -> None:
    ours = [1.1, 1.9, 1.2, 1.8, 1.3, 1.7, 1.4, 1.6, 1.5, 9.0]
    found = ratio_of(ours, [1.0] * 10, more_is_better=True)
    assert found.median == pytest.approx(1.55)
    assert (found.lower, found.upper, found.n) == (1.2, 1.9, 10)
    # By hand: 1 − 2 (C(10,0) + C(10,1)) / 2^10.
    assert found.confidence == pytest.approx(1 - 22 / 1024)


@pytest.mark.parametrize(("n", "rank"), [(1, None), (5, None), (6, 1), (8, 1), (9, 2), (10, 2), (12, 3), (20, 6)])
def test_ranks_are_those_of_the_tables(n: int, rank: int | None) -> None:
    assert order_statistics(n)[0] == rank


def test_too_few_pairs_have_no_interval() -> None:
    found = ratio_of([1.0, 2.0], [1.0, 1.0], more_is_better=True)
    assert (found.median, found.lower, found.upper, found.confidence) == (1.5, None, None, None)


def test_the_interval_covers_the_median_as_often_as_it_says(rng: random.Random) -> None:
    """Of a skewed distribution, whose median is 1; far too narrow an interval would miss more."""
    hits = 0
    for _ in range(2000):
        found = ratio_of([rng.lognormvariate(0, 1) for _ in range(10)], [1.0] * 10, more_is_better=True)
        assert found.lower is not None and found.upper is not None
        hits += found.lower <= 1.0 <= found.upper
    assert 0.965 < hits / 2000 < 0.99, "97.85 % by the formula"


def test_what_is_no_pair_or_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        ratio_of([1.0], [1.0, 2.0], more_is_better=True)
    with pytest.raises(ValueError, match="positive"):
        ratio_of([0.0], [1.0], more_is_better=True)


def test_a_tail_of_few_samples_is_the_worst_of_them() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile([float(value) for value in range(1, 201)], 0.99) == 198.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == median([1.0, 2.0, 3.0])
