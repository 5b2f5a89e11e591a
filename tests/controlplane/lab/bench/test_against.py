"""What is said of other gateways: figures, what is missing, and why."""

from __future__ import annotations

from controlplane.lab.bench.against import _section

FIGURES = {
    "requests_per_s_c16": 50.0,
    "ours_requests_per_s_c16": 1000.0,
    "added_ms_p50_c1": 20.0,
    "ours_added_ms_p50_c1": 1.0,
    "added_ms_p99_c1": 60.0,
    "ours_added_ms_p99_c1": 4.0,
    "stream_tokens_per_s_16": None,
    "ours_stream_tokens_per_s_16": 40_000.0,
    "requests_ratio": 20.0,
    "added_p50_ratio": 0.05,
    "streams_missing": "status 500",
    "setup": "keys on",
    "version": "1.2",
}


def test_both_of_a_pair_are_shown_and_what_is_missing_is_said() -> None:
    section = _section({"rival": dict(FIGURES)}, {"other": "cannot install it"})
    table = section.tables[0]
    assert table.rows == (
        ("tidegate", "1,000", "1.00", "4.00", "40,000", "", ""),
        ("rival 1.2", "50", "20.00", "60.00", "-", "20.0×", "0.050×"),
        ("other", "-", "-", "-", "-", "-", "-"),
    )
    for said in ("rival: keys on.", "rival relays no stream: status 500.", "other is not measured: cannot install it."):
        assert said in table.note
    assert section.results["against"]["other"] == {"missing": "cannot install it"}
    assert section.results["against"]["rival"]["requests_ratio"] == 20.0


def test_nothing_that_installs_is_no_failure() -> None:
    section = _section({}, {"litellm": "no network", "portkey": "no node"})
    assert [row[0] for row in section.tables[0].rows] == ["litellm", "portkey"]
