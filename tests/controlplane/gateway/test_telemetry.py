"""What the gateway counts and how it reaches the control plane: once, whatever is lost on the way (F28)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway import telemetry
from controlplane.gateway.record import Outcome, RequestRecord
from controlplane.gateway.reporter import GatewayReporter
from controlplane.gateway.telemetry import STRANGERS, Recorder
from controlplane.settings import Settings
from controlplane.telemetry.validation import (
    RefusedError,
    check_gateway_report,
    check_gateway_window,
    check_refusals,
    check_series,
)
from controlplane.tenants.schemas import KeyGrant
from dataplane.protocol import Command, GatewayCounters, GatewayRefusals, GatewayReport, Histogram, ReportAck, encode
from tests.services import free_port


class Wall:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def grant(tenant: str = "acme") -> KeyGrant:
    return KeyGrant(
        key_id="k",
        secret_hash=b"",
        tenant_id="t",
        tenant=tenant,
        cache_salt="",
        allowed_models=None,
        revoked=False,
        tenant_active=True,
    )


def record(
    outcome: Outcome = Outcome.FINISHED, reason: str = "stop", tenant: str = "acme", **fields: object
) -> RequestRecord:
    made = RequestRecord(request_id="r", grant=grant(tenant), at=0.0, accepted=0.0, pool="p", replica="r0")
    for name, value in fields.items():
        setattr(made, name, value)
    made.conclude(outcome, reason, 200)
    return made


class Receiver:
    """The control plane's side of the contract: a newer report replaces (start, series)."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str, str, str], tuple[int, bytes]] = {}

    def take(self, report: GatewayReport, now: float) -> None:
        check_gateway_report(report, report.sent_at)
        for window in report.windows:
            check_gateway_window(window, now)
            for series in window.series:
                check_series(series)
                key = (window.start, series.tenant, series.pool, series.replica)
                if key not in self.rows or self.rows[key][0] < report.sequence:
                    self.rows[key] = (report.sequence, encode(series.counters))

    def total(self) -> GatewayCounters:
        total = GatewayCounters()
        for _, data in self.rows.values():
            total.merge(msgspec.msgpack.decode(data, type=GatewayCounters))
        return total


def test_a_request_ends_in_one_outcome_of_one_series_and_a_refused_one_is_not_accepted() -> None:
    recorder = Recorder(wall=Wall())
    recorder.end(record(prompt_tokens=5, cached_tokens=4, output_tokens=3, ttft_s=0.5, tpot_s=0.1, e2e_s=1.0))
    recorder.end(record(Outcome.REFUSED, "no_capacity"))
    recorder.end(record(Outcome.FAILED, "upstream_reset"))
    recorder.end(record(Outcome.CANCELLED, ""))
    stranger = RequestRecord(request_id="s", grant=None, at=0.0, accepted=0.0)
    stranger.conclude(Outcome.REFUSED, "invalid_api_key", 401)
    recorder.end(stranger)
    (window,), _ = recorder.pending()
    series = {s.tenant: s.counters for s in window.series}
    mine = series["acme"]
    assert (mine.accepted, mine.finished, mine.cancelled) == (3, {"stop": 1}, 1)
    assert (mine.refused, mine.failed) == ({"no_capacity": 1}, {"upstream_reset": 1})
    assert (mine.prompt_tokens, mine.cached_tokens, mine.output_tokens) == (5, 4, 3)
    assert mine.ttft == Histogram(count=1, total=0.5, buckets={-8: 1})
    assert mine.ttft_visible is None
    assert mine.e2e is not None
    assert mine.e2e.count == 1  # of finished requests only
    assert series[STRANGERS].refused == {"invalid_api_key": 1}
    assert series[STRANGERS].accepted == 0


def test_accepted_and_ttft_are_counted_when_they_happen_and_only_once() -> None:
    wall = Wall()
    recorder = Recorder(wall=wall)
    one = RequestRecord(request_id="r", grant=grant(), at=0.0, accepted=0.0, pool="p", replica="first")
    recorder.accept(one)
    one.replica = "second"
    recorder.accept(one)
    wall.now += 10
    one.ttft_s = 0.25
    recorder.first_tokens(one)
    one.ttft_visible_s = 0.5
    recorder.first_tokens(one)
    wall.now += 10
    one.conclude(Outcome.FINISHED, "length", 200)
    recorder.end(one)
    windows, _ = recorder.pending()
    got = [
        (s.replica, s.counters.accepted, s.counters.ttft is not None, s.counters.finished)
        for w in windows
        for s in w.series
    ]
    assert got == [("first", 1, False, {}), ("second", 0, True, {}), ("second", 0, False, {"length": 1})]


def test_only_what_changed_is_sent_again_and_what_is_stored_is_forgotten() -> None:
    wall = Wall()
    recorder = Recorder(wall=wall)
    recorder.end(record())
    windows, versions = recorder.pending()
    recorder.acknowledge(versions)
    assert recorder.pending()[0] == []
    recorder.refused()
    recorder.end(record())
    again, versions = recorder.pending()
    assert again[0].start == windows[0].start
    assert again[0].series[0].counters.accepted == 2  # whole, not the difference
    wall.now += 10
    recorder.acknowledge(versions)
    assert recorder.windows == 0


def test_a_count_that_comes_while_its_window_travels_is_sent_with_the_next() -> None:
    recorder = Recorder(wall=Wall())
    recorder.end(record())
    _, versions = recorder.pending()
    recorder.end(record())
    recorder.acknowledge(versions)
    windows, _ = recorder.pending()
    assert windows[0].series[0].counters.accepted == 2


def test_a_report_holds_a_bounded_number_of_windows_oldest_first() -> None:
    wall = Wall()
    recorder = Recorder(wall=wall)
    for _ in range(50):
        recorder.end(record())
        wall.now += 10
    windows, versions = recorder.pending()
    assert len(windows) == telemetry.WINDOWS_PER_REPORT
    recorder.acknowledge(versions)
    rest, _ = recorder.pending()
    assert len(rest) == 20
    assert rest[0].start > windows[-1].start


def test_a_long_outage_merges_old_windows_and_loses_no_count() -> None:
    wall = Wall()
    recorder = Recorder(wall=wall)
    for _ in range(telemetry.MAX_WINDOWS + 200):
        recorder.end(record(e2e_s=1.0))
        wall.now += 10
    assert recorder.windows <= telemetry.MAX_WINDOWS + 1
    total = GatewayCounters()
    while True:
        windows, versions = recorder.pending()
        if not windows:
            break
        for window in windows:
            total.merge(window.series[0].counters)
        recorder.acknowledge(versions)
    assert total.accepted == telemetry.MAX_WINDOWS + 200
    assert total.e2e is not None
    assert total.e2e.count == telemetry.MAX_WINDOWS + 200


def test_tenants_beyond_the_bound_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_SERIES", 5)
    recorder = Recorder(wall=Wall())
    for i in range(20):
        recorder.end(record(tenant=f"t{i}"))
    (window,), _ = recorder.pending()
    assert len(window.series) <= 6
    assert sum(s.counters.accepted for s in window.series) == 20


@given(st.lists(st.sampled_from(["count", "tick", "stored", "lost answer", "refused", "lost request"]), max_size=80))
def test_f28_the_receiver_ends_with_every_count_once_whatever_is_lost(steps: list[str]) -> None:
    """Reports and answers get lost in any order while counting goes on; windows are few, so that they merge."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry, "MAX_WINDOWS", 6)
        patch.setattr(telemetry, "WINDOWS_PER_REPORT", 2)
        wall, receiver, counted, sequence = Wall(), Receiver(), 0, 0
        recorder = Recorder(wall=wall)

        def report() -> tuple[GatewayReport, dict[int, int]]:
            nonlocal sequence
            sequence += 1
            windows, versions = recorder.pending()
            made = GatewayReport(
                gateway="g",
                boot_epoch=1,
                sequence=sequence,
                acknowledged=0,
                sent_at=wall.now,
                started_at=1.0,
                windows=windows,
            )
            return msgspec.msgpack.decode(encode(made), type=GatewayReport), versions

        for step in [*steps, *["stored"] * 60]:
            if step == "count":
                recorder.end(record(e2e_s=0.5))
                counted += 1
            elif step == "tick":
                wall.now += 10
            else:
                sent, versions = report()
                if step in {"stored", "lost answer"}:
                    receiver.take(sent, wall.now)
                if step == "stored":
                    recorder.acknowledge(versions)
                elif step == "refused":
                    recorder.refused()
                else:
                    recorder.doubt(versions)
        total = receiver.total()
        assert total.accepted == sum(total.finished.values()) == counted
        assert (total.e2e.count if total.e2e else 0) == counted


class Control:
    """A control plane that answers as it is told."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.receiver = Receiver()
        self.reports: list[GatewayReport] = []
        self.mode = "store"
        self.commands: list[Command] = []

    async def take(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == "Bearer internal-token-of-the-tests"
        assert request.content_type == "application/msgpack"
        report = msgspec.msgpack.decode(await request.read(), type=GatewayReport)
        self.reports.append(report)
        if self.mode == "away":
            return web.Response(status=503)
        self.receiver.take(report, Wall().now)
        if self.mode == "drop":
            assert request.transport is not None
            request.transport.abort()
        ack = ReportAck(sequence=report.sequence, commands=self.commands)
        return web.Response(body=encode(ack), content_type="application/msgpack")


@pytest.fixture
async def control() -> AsyncIterator[Control]:
    control = Control(free_port())
    app = web.Application()
    app.router.add_post("/internal/v1/gateway-reports", control.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", control.port).start()
    yield control
    await runner.cleanup()


async def test_f28_reports_survive_refusals_lost_answers_and_a_resync(
    control: Control, offline_settings: Settings, rng: Random
) -> None:
    settings = msgspec.structs.replace(
        offline_settings, control_url=f"http://127.0.0.1:{control.port}", gateway_id="gw-1"
    )
    recorder = Recorder(wall=Wall())
    reporter = GatewayReporter(settings, recorder, in_flight=lambda: 3, policy_epoch=lambda: 7)
    async with reporter._session(5.0) as session:
        counted = 0
        for _ in range(40):
            control.mode = rng.choice(["store", "away", "drop"])
            recorder.end(record())
            counted += 1
            assert await reporter.send(session) == (control.mode == "store")
        control.mode = "store"
        assert await reporter.send(session)
        assert control.receiver.total().accepted == counted
        assert [r.sequence for r in control.reports] == sorted({r.sequence for r in control.reports})
        last = control.reports[-1]
        assert (last.gateway, last.in_flight, last.policy_epoch) == ("gw-1", 3, 7)
        assert control.reports[0].full
        assert await reporter.send(session)
        assert control.reports[-1].windows == []
        assert control.reports[-1].acknowledged == last.sequence
        control.commands = [Command(id="1", kind="resync")]
        await reporter.send(session)
        control.commands = []
        await reporter.send(session)
        assert control.reports[-1].full
        assert control.reports[-1].windows[0].series[0].counters.accepted == counted
    assert control.receiver.total().accepted == counted


async def test_a_control_plane_that_is_not_there_costs_nothing_but_the_wait(offline_settings: Settings) -> None:
    settings = msgspec.structs.replace(offline_settings, control_url=f"http://127.0.0.1:{free_port()}")
    recorder = Recorder()
    recorder.end(record())
    reporter = GatewayReporter(settings, recorder, in_flight=lambda: 0, policy_epoch=lambda: 0)
    async with aiohttp.ClientSession() as session:
        assert not await reporter.send(session)
    await reporter.last_words()
    windows, _ = recorder.pending()
    assert windows[0].series[0].counters.accepted == 1


def test_boot_epochs_grow_from_start_to_start(offline_settings: Settings) -> None:
    wall = Wall()
    first = GatewayReporter(offline_settings, Recorder(), in_flight=lambda: 0, policy_epoch=lambda: 0, wall=wall)
    wall.now += 0.01
    second = GatewayReporter(offline_settings, Recorder(), in_flight=lambda: 0, policy_epoch=lambda: 0, wall=wall)
    assert second.boot_epoch > first.boot_epoch > 0


def refusal(
    tenant: str = "acme", code: str = "tokens_per_day_exceeded", quota: str = "q1", number: int = 0
) -> RequestRecord:
    return record(
        Outcome.REFUSED,
        code,
        tenant,
        request_id=f"r{number}",
        refused_quota=quota,
        refused_kind="tokens_per_day",
        refused_message="no",
    )


def explained(recorder: Recorder) -> dict[tuple[str, str, str], tuple[int, list[str]]]:
    """Count and latest request ids of every reason told, over all windows."""
    windows, _ = recorder.pending()
    recorder.refused()
    found: dict[tuple[str, str, str], tuple[int, list[str]]] = {}
    for window in windows:
        for one in window.refusals:
            check_refusals(one)
            key = (one.tenant, one.code, one.quota_id)
            count, latest = found.get(key, (0, []))
            found[key] = (count + one.count, latest + [each.request_id for each in one.latest])
    return found


def test_refusals_are_counted_by_tenant_and_reason_with_the_latest_of_them() -> None:
    recorder = Recorder(wall=Wall())
    for number in range(8):
        recorder.end(refusal(number=number))
    recorder.end(refusal("globex", "model_not_found", "", 9))
    assert explained(recorder) == {
        ("acme", "tokens_per_day_exceeded", "q1"): (8, ["r3", "r4", "r5", "r6", "r7"]),
        ("globex", "model_not_found", ""): (1, ["r9"]),
    }


def test_a_tenant_with_many_limits_takes_no_room_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_REFUSALS", 50)
    recorder = Recorder(wall=Wall())
    for number in range(1000):
        recorder.end(refusal(quota=f"q{number}"))
    recorder.end(refusal("globex"))
    found = explained(recorder)
    assert found["globex", "tokens_per_day_exceeded", "q1"][0] == 1
    assert len(found) == telemetry.MAX_LIMITS + 2
    assert sum(count for (tenant, _, _), (count, _) in found.items() if tenant == "acme") == 1000


def test_while_nobody_takes_reports_the_requests_are_forgotten_before_the_counts() -> None:
    wall = Wall()
    recorder = Recorder(wall=wall)
    for number in range(20):
        recorder.end(refusal(number=number))
        wall.now += 10
    count, latest = explained(recorder)["acme", "tokens_per_day_exceeded", "q1"]
    assert count == 20
    assert len(latest) <= telemetry.EXPLAINED_S // 10 + 1


@pytest.mark.parametrize("wrong", [{"tenant": ""}, {"code": "x\x00"}, {"count": -1}, {"quota_id": "x" * 201}])
def test_f22_refusals_that_cannot_be_are_not_stored(wrong: dict[str, object]) -> None:
    with pytest.raises(RefusedError):
        check_refusals(GatewayRefusals(**{"tenant": "acme", "code": "x", "count": 1, **wrong}))  # type: ignore[arg-type]
