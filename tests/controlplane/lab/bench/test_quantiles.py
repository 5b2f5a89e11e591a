"""Quantiles by nearest rank."""

from __future__ import annotations

import pytest

from controlplane.lab.bench.quantiles import Spread, quantile, spread


def test_quantiles_are_samples_by_nearest_rank() -> None:
    hundred = [float(n) for n in range(100, 0, -1)]
    assert [quantile(hundred, share) for share in (0.01, 0.5, 0.99, 0.999, 1.0)] == [1, 50, 99, 100, 100]
    assert quantile([7.0], 0.5) == quantile([7.0], 0.99) == 7
    assert quantile([1.0, 2.0], 0.5) == 1


def test_a_spread_is_in_milliseconds() -> None:
    assert spread([0.001] * 98 + [0.5, 0.6]) == Spread(100, 1.0, 500.0)


@pytest.mark.parametrize(("samples", "share"), [([], 0.5), ([1.0], 0.0), ([1.0], 1.5)])
def test_what_has_no_quantile_is_refused(samples: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"no samples|no share"):
        quantile(samples, share)
