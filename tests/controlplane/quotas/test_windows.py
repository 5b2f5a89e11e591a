"""Calendar windows against the clocks themselves, stepped through minute by minute."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.quotas.windows import Calendar, UnknownZoneError, day, month, month_of, windows

ZONES = {
    # zone: the days around both edges of its daylight time, in a year in which midnight itself is hit where it can be
    "UTC": (date(2024, 3, 10), date(2024, 11, 3)),
    "America/New_York": (date(2024, 3, 10), date(2024, 11, 3)),
    "Europe/London": (date(2025, 3, 30), date(2025, 10, 26)),
    "America/Sao_Paulo": (date(2018, 11, 4), date(2018, 2, 18)),  # no midnight; 23:00 to 24:00 twice
    "Asia/Beirut": (date(2024, 3, 31), date(2024, 10, 27)),
    "Africa/Cairo": (date(2024, 4, 26), date(2024, 11, 1)),
    "America/Santiago": (date(2024, 9, 8), date(2024, 4, 7)),
    "America/Havana": (date(2024, 3, 10), date(2024, 11, 3)),  # 00:00 to 01:00 twice in November
    "America/St_Johns": (date(2010, 3, 14), date(2010, 11, 7)),  # changed at 00:01: back over midnight
    "Australia/Lord_Howe": (date(2024, 10, 6), date(2024, 4, 7)),  # by half an hour
    "Asia/Kathmandu": (date(2024, 3, 10), date(2024, 11, 3)),  # 5:45 ahead, no daylight time
    "Pacific/Apia": (date(2011, 9, 24), date(2011, 12, 30)),  # left out 30 December 2011
    "America/Toronto": (date(1919, 3, 31), date(1919, 10, 26)),  # jumped from 23:30 to 00:30
}
EDGES = [(zone, edge) for zone, edges in ZONES.items() for edge in edges]


def first_reached(zone: str, wanted: date) -> int:
    """The oracle: the first whole minute at which the zone's clocks show `wanted` or a later date."""
    at = int(datetime(wanted.year, wanted.month, wanted.day, tzinfo=ZoneInfo("UTC")).timestamp()) - 26 * 3600
    while datetime.fromtimestamp(at, ZoneInfo(zone)).date() < wanted:
        at += 60
    return at


@pytest.mark.parametrize(("zone", "edge"), EDGES)
def test_f9_a_day_starts_when_clocks_first_reach_it_at_both_edges_of_daylight_time(zone: str, edge: date) -> None:
    starts = sorted({first_reached(zone, edge + timedelta(days=each)) for each in range(-2, 5)})
    assert len(starts) >= 6  # one fewer where the zone left a date out
    for start, end, after in zip(starts, starts[1:], starts[2:], strict=False):
        for at in (start, start + 1, (start + end) // 2, end - 1, end - 0.001):
            found = day(zone, at)
            assert (found.start, found.end, found.next_end) == (start, end, after)


@pytest.mark.parametrize("zone", ZONES)
def test_f9_february_has_29_days_in_leap_years_only(zone: str) -> None:
    for year, days in ((2024, 29), (2023, 28), (2000, 29), (2100, 28)):
        last = date(year, 3, 1) - timedelta(days=1)
        assert last.day == days
        inside = datetime(year, 2, days, 12, tzinfo=ZoneInfo(zone)).timestamp()
        found = month(zone, inside)
        edges = [first_reached(zone, date(year, number, 1)) for number in (2, 3, 4)]
        assert [found.start, found.end, found.next_end] == edges
        assert (found.start, found.end) == month_of(zone, year, 2)
        assert day(zone, inside).end == found.end
        assert month(zone, found.end).start == found.end


def test_the_edges_that_made_this_hard_are_what_people_there_saw() -> None:
    def shown(zone: str, at: int) -> str:
        return datetime.fromtimestamp(at, ZoneInfo(zone)).strftime("%Y-%m-%d %H:%M %z")

    noon = datetime(2018, 11, 4, 12, tzinfo=ZoneInfo("America/Sao_Paulo")).timestamp()
    assert shown("America/Sao_Paulo", day("America/Sao_Paulo", noon).start) == "2018-11-04 01:00 -0200"
    assert day("America/Sao_Paulo", noon).end - day("America/Sao_Paulo", noon).start == 23 * 3600
    noon = datetime(2024, 11, 3, 12, tzinfo=ZoneInfo("America/Havana")).timestamp()
    assert shown("America/Havana", day("America/Havana", noon).start) == "2024-11-03 00:00 -0400"
    assert day("America/Havana", noon).end - day("America/Havana", noon).start == 25 * 3600
    noon = datetime(1919, 3, 31, 12, tzinfo=ZoneInfo("America/Toronto")).timestamp()
    assert shown("America/Toronto", day("America/Toronto", noon).start) == "1919-03-31 00:30 -0400"
    eve = datetime(2011, 12, 29, 12, tzinfo=ZoneInfo("Pacific/Apia")).timestamp()
    assert shown("Pacific/Apia", day("Pacific/Apia", eve).end) == "2011-12-31 00:00 +1400"
    repeated = datetime(2010, 11, 6, 23, 30, fold=1, tzinfo=ZoneInfo("America/St_Johns")).timestamp()
    assert shown("America/St_Johns", day("America/St_Johns", repeated).start) == "2010-11-07 00:00 -0230"
    assert month_of("Asia/Kolkata", 2026, 1)[0] == datetime(2025, 12, 31, 18, 30, tzinfo=ZoneInfo("UTC")).timestamp()


@given(
    zone=st.sampled_from(sorted(ZONES)),
    calendar=st.sampled_from(Calendar),
    at=st.floats(min_value=-2_000_000_000, max_value=5_000_000_000),
)
def test_f9_windows_hold_their_instant_and_touch_without_gap_or_overlap(
    zone: str, calendar: Calendar, at: float
) -> None:
    found = windows(zone, calendar, at)
    assert found.start <= at < found.end < found.next_end
    following = windows(zone, calendar, found.end)
    assert (following.start, following.end) == (found.end, found.next_end)
    assert windows(zone, calendar, found.start) == found
    assert windows(zone, calendar, found.end - 1) == found


@given(zone=st.sampled_from(sorted(ZONES)), at=st.integers(0, 3_000_000_000), missed=st.integers(0, 400 * 86_400))
def test_f9_a_missed_tick_changes_nothing(zone: str, at: int, missed: int) -> None:
    """Whoever asks for the first time after any outage is told the same as one who followed every window."""
    followed = month(zone, at)
    while followed.end <= at + missed:
        followed = month(zone, followed.end)
    assert month(zone, at + missed) == followed


@pytest.mark.parametrize("name", ["", "Europe", "Mars/Olympus", "../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000])
def test_a_name_that_is_no_zone_is_refused_as_one(name: str) -> None:
    with pytest.raises(UnknownZoneError, match="there is no time zone"):
        day(name, 0)
