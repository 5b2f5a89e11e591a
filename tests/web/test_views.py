"""From an Overview to the page's texts: sides apart, states with a word, gaps as gaps."""

from __future__ import annotations

import re

import msgspec

from controlplane.console import regions, views
from controlplane.console.replica_card import replica_card
from controlplane.console.sparkline import sparkline
from controlplane.console.templates import WEB, Templates
from controlplane.fleet.schemas import ReplicaView
from controlplane.gateway.telemetry import OTHER, STRANGERS
from controlplane.telemetry.schemas import Overview, ScopedFigures
from dataplane.protocol import CoreReady, Gauges, ReplicaState
from tests.web.samples import EMPTY, an_overview, evidence, quantiles, series

NOW = 1_790_000_000.0


def test_gateway_and_engine_latencies_stand_in_rows_of_their_own() -> None:
    page = views.overview_page(
        an_overview(
            msgspec.structs.replace(EMPTY, ttft=quantiles(10, 0.2, 0.4, 0.6), engine_ttft=quantiles(12, 0.1, 0.3, 0.5))
        )
    )
    rows = {(row.side, row.label): (str(row.p50), str(row.p95), str(row.p99), row.n) for row in page.ttft}
    assert rows["gateway", "Gateway, first token"] == ("200 ms", "400 ms", "600 ms", "10")
    assert rows["engine", "Engine"] == ("100 ms", "300 ms", "500 ms", "12")
    assert not {"150 ms", "350 ms"} & {text for row in rows.values() for text in row}


def test_nothing_observed_shows_dashes_everywhere() -> None:
    page = views.overview_page(an_overview())
    assert [stat.figure.text for stat in page.stats] == ["—"] * len(page.stats)
    assert all(stat.spark is None and stat.meter is None for stat in page.stats)
    assert {outcome.count for outcome in page.outcomes} == {"—"}


def test_counts_are_zero_once_a_gateway_reported_and_not_before() -> None:
    reported = msgspec.structs.replace(EMPTY, request_rate=evidence(0.0, "requests/s"))
    assert {outcome.count for outcome in views.overview_page(an_overview(reported)).outcomes} == {"0"}


def test_every_cause_of_a_refusal_is_shown_with_its_count_up_to_a_bound() -> None:
    refused = {f"cause_{i:02d}": 100 - i for i in range(views.MAX_CAUSES)}
    reported = msgspec.structs.replace(EMPTY, request_rate=evidence(1.0, "requests/s"), refused=refused)

    def outcome(overview: Overview) -> views.Outcome:
        return next(each for each in views.overview_page(overview).outcomes if each.label == "Refused")

    shown = outcome(an_overview(reported))
    assert shown.causes == tuple(f"{cause}\N{NO-BREAK SPACE}{n}" for cause, n in refused.items())
    page = regions.overview_regions(Templates(), an_overview(reported), stale_after_s=5.0)["outcomes"]
    assert all(f">{cause}<" in page.replace("<wbr>", "") for cause in shown.causes)
    beyond = msgspec.structs.replace(reported, refused={"rare_b": 1, **refused, "rare_a": 2})
    assert outcome(an_overview(beyond)).causes == (*shown.causes, "and 2 more")


def test_every_place_to_go_has_an_icon_of_its_own() -> None:
    folder = WEB / "templates"
    names = re.findall(r'<li><a href=.*icon\("([a-z]+)"\)', (folder / "layouts/app.html").read_text())
    drawn = (folder / "components/icon.html").read_text()
    assert len(names) == len(set(names)) >= 9
    assert all(f'name == "{name}"' in drawn for name in names)


def test_every_state_has_a_word_and_an_icon_of_its_own() -> None:
    tones = [views.tone(state) for state in ReplicaState]
    assert len({tone.label for tone in tones}) == len(tones)
    assert len({tone.icon for tone in tones}) == len(tones)
    assert views.tone("").label == "Unknown"


def test_part_of_a_window_covered_is_said() -> None:
    young = msgspec.structs.replace(EMPTY, request_rate=evidence(1.0, "requests/s", window_s=43.0))
    assert views.overview_page(an_overview(young)).covered == "43 s"
    full = msgspec.structs.replace(EMPTY, request_rate=evidence(1.0, "requests/s", window_s=296.0))
    assert views.overview_page(an_overview(full)).covered == ""


def test_a_replica_card_shows_blocks_and_both_sides() -> None:
    gauges = Gauges(running=2, waiting=1, blocks_total=200, blocks_used=50, blocks_free=150, block_size=16)
    view = ReplicaView(
        replica="r0", pool="p", model="m", url="http://127.0.0.1:1", state=ReplicaState.READY, state_reason="",
        state_since=NOW - 60, age_s=0.4, boot_epoch=1, core_epoch=2, core_restarts=3, started_at=None, policy_epoch=4,
        ready=None, gauges=gauges,
    )  # fmt: skip
    figures = msgspec.structs.replace(EMPTY, ttft=quantiles(10, 0.2, 0.4, 0.6), engine_ttft=quantiles(9, 0.1, 0.3, 0.5))
    card = replica_card(view, ScopedFigures(key="r0", label="r0", state="ready", figures=figures))
    assert (str(card.kv), card.kv_text, card.restarts) == ("25 %", "50 of 200 blocks", 3)
    latencies = {label: str(row.p95) for label, row in card.latencies}
    assert (latencies["TTFT engine"], latencies["TTFT gateway"]) == ("300 ms", "400 ms")
    silent = replica_card(msgspec.structs.replace(view, gauges=None), None)
    assert (silent.kv.text, silent.running.text, silent.latencies) == ("—", "—", ())


def a_core(**told: str) -> CoreReady:
    return CoreReady(boot_epoch=1, model="m", max_model_len=2048, block_size=16, total_blocks=512, **told)


def test_a_replicas_forward_and_weights_are_beside_its_name_as_far_as_it_told_them() -> None:
    told = [
        (
            "r0",
            a_core(forward="captured", kernel_tier="avx2", weights="blocks"),
            "captured on avx2 · weights in blocks",
        ),
        ("r1", a_core(forward="eager", weights="float32"), "eager · weights in float32"),
        ("r2", a_core(), ""),
        ("r3", None, ""),
    ]
    rows = [ScopedFigures(key=key, label=key, ready=ready, figures=EMPTY) for key, ready, _ in told]
    rendered = str(regions.overview_regions(Templates(), an_overview(by_replica=rows), stale_after_s=5.0)["replicas"])
    names = re.findall(r"<code>(.*?)</code></a>(?:<small>(.*?)</small>)?</th>", rendered)
    assert names == [(key, text) for key, _, text in told]


def test_a_gap_in_a_sparkline_is_not_bridged() -> None:
    drawn = sparkline([1.0, 2.0, None, 3.0, None, 1.0, 1.0])
    assert drawn is not None
    assert len(drawn.lines) == 2
    assert len(drawn.dots) == 1
    assert sparkline([None, None]) is None
    flat = sparkline([0.0, 0.0])
    assert flat is not None
    assert flat.lines[0].count("26.0") == 2


def test_series_events_carry_only_what_changed() -> None:
    before = series([1.0, None, 2.0])
    assert regions.series_event(before, before) is None
    full = regions.series_event(before)
    assert full is not None
    assert [row[:2] for row in full.rows] == [[before.at[0], 1.0], [before.at[1], None], [before.at[2], 2.0]]
    after = series([None, 2.5, 3.0], start=before.at[1])
    delta = regions.series_event(after, before)
    assert delta is not None
    assert delta.start == before.at[1]
    assert [row[0] for row in delta.rows] == [before.at[2], before.at[2] + 10]


def test_regions_escape_what_operators_and_replicas_named() -> None:
    evil = "<script>alert(1)</script>"
    figures = msgspec.structs.replace(EMPTY, failed={evil: 1})
    overview = an_overview(figures, by_tenant=[ScopedFigures(key=evil, label=evil, figures=EMPTY)])
    rendered = regions.overview_regions(Templates(), overview, stale_after_s=5.0)
    for region in ("tenants", "outcomes"):
        assert evil not in rendered[region]
        assert "&lt;script&gt;" in rendered[region]


def test_only_a_tenant_that_can_have_a_page_is_a_link_to_it() -> None:
    rows = [ScopedFigures(key=key, label=key, figures=EMPTY) for key in ("acme", STRANGERS, OTHER)]
    rendered = str(regions.overview_regions(Templates(), an_overview(by_tenant=rows), stale_after_s=5.0)["tenants"])
    assert re.findall(r'href="([^"]+)"', rendered) == ["/tenants/acme"]
    for key in (STRANGERS, OTHER):
        assert f'<th scope="row">{key}</th>' in rendered


def status_of(overview: Overview, **rest: float) -> str:
    return str(regions.overview_regions(Templates(), overview, stale_after_s=5.0, **rest)["status"])


def test_the_status_tells_live_waiting_stale_and_no_redis_apart() -> None:
    assert 'data-state="live"' in status_of(an_overview())
    assert 'data-state="waiting"' in status_of(an_overview(last_report_at=None))
    stale = status_of(an_overview(last_report_at=NOW - 60))
    assert 'data-state="stale"' in stale
    assert "since" in stale
    degraded = status_of(an_overview(), redis_away_since=NOW - 3)
    assert 'data-state="degraded"' in degraded
    assert "Redis does not answer" in degraded


def test_f23_forged_headers_are_shown_with_who_sent_them_and_only_when_there_are_any() -> None:
    forged = msgspec.structs.replace(EMPTY, forged=3)
    rows = [ScopedFigures(key="acme", label="acme", figures=forged)]
    shown = regions.overview_regions(Templates(), an_overview(forged, by_tenant=rows), stale_after_s=5.0)
    assert "<small>3 forged headers</small>" in shown["tenants"]
    assert "3 forged headers dropped" in shown["footnote"]
    quiet = regions.overview_regions(Templates(), an_overview(), stale_after_s=5.0)
    assert "forged" not in quiet["footnote"]
