"""Figures of rounds that take turns."""

from __future__ import annotations

import pytest

from controlplane.lab.bench.requests import Target
from controlplane.lab.bench.rounds import Rounds


def test_the_median_is_of_each_figure_and_the_spread_of_all_rounds() -> None:
    rounds = Rounds(Target("engine", 1, "none", "m"), 7)
    for rate, cpu in ((1500.4, 2.0), (900.0, 9.0), (1000.0, 3.0)):
        rounds.add(rate=rate, cpu=cpu)
    assert (rounds.median("rate"), rounds.median("cpu")) == (1000.0, 3.0)
    assert rounds.spread("rate") == "900 to 1,500"
    with pytest.raises(KeyError):
        rounds.median("latency")
