"""What being behind is called."""

from __future__ import annotations

import pytest

from controlplane.policy.skew import SETTLES_S, Skew, judge


@pytest.mark.parametrize(
    ("epoch", "silent_s", "missed_s", "state", "for_s"),
    [
        (9, 0.5, None, Skew.CURRENT, None),
        (8, 0.5, 1.0, Skew.SETTLING, 1.0),
        (8, 0.5, SETTLES_S + 1, Skew.BEHIND, SETTLES_S + 1),
        (2, 0.5, None, Skew.BEHIND, None),
        (10, 0.5, None, Skew.AHEAD, None),
        (9, 6.0, None, Skew.SILENT, 6.0),
        (8, 6.0, 90.0, Skew.SILENT, 6.0),
    ],
)
def test_f17_every_way_to_differ_has_a_name_and_an_age(
    epoch: int, silent_s: float, missed_s: float | None, state: Skew, for_s: float | None
) -> None:
    told = judge(epoch, 9, silent_s=silent_s, stale_after_s=5.0, missed_s=missed_s)
    assert (told.state, told.for_s) == (state, for_s)
