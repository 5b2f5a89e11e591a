"""F22: a report or a part of it that would poison sums is refused with a reason; what is honest passes."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from controlplane.telemetry.validation import (
    MAX_AGE_S,
    RefusedError,
    check_gateway_report,
    check_report,
    check_series,
    check_usage,
    check_window,
)
from controlplane.telemetry.windows import engine_rows, gateway_rows
from dataplane.protocol import (
    Counters,
    GatewayWindow,
    Histogram,
    RuntimeCounters,
    SchedulingCounters,
    ServiceCounters,
    TenantService,
    Window,
)
from tests.controlplane.telemetry.reports import counters, engine_window, gateway_report, report, series, usage

NOW = 1_700_000_005.0
START = 1_700_000_000
NAMELESS = SchedulingCounters(tenants={"": TenantService()})


def changed(value: object, **changes: object) -> object:
    return msgspec.structs.replace(value, **changes)  # type: ignore[type-var]


def test_an_honest_report_passes() -> None:
    window = engine_window(START, ttft=[0.2, 0.0, 9_000.0], queries=100, hits=50, blocks_used=3.0)
    window.counters.runtime = RuntimeCounters(flops=3e16, bytes=1e13)
    window.counters.scheduling.tenants["demo"] = TenantService(prompt_tokens=3, kv_block_seconds=1.5)
    check_report(report(windows=[window], boot_epoch=1_700_000_000_000), NOW)
    check_window(window, NOW)
    check_usage(usage(boot_epoch=1_700_000_000_000_000_000), "r1")
    check_gateway_report(gateway_report([GatewayWindow(start=START, series=[series("demo", counters())])]), NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"replica": ""},
        {"pool": ""},
        {"model": "x" * 201},
        {"replica": "a\x00b"},
        {"replica": "a\nb"},
        {"url": "file:///etc/passwd"},
        {"url": "http://"},
        {"url": "http://host:99999"},
        {"url": "http://[::1"},
        {"url": "http://user:secret@host"},
        {"url": "http://host/#fragment"},
        {"url": "http://host:0"},
        {"url": "http://2130706433"},
        {"boot_epoch": 1_700_000_000_000_000_000},
        {"boot_epoch": 2**63 - 1},
        {"boot_epoch": 1_700_000_000_000, "sequence": 1_000_000},
        {"boot_epoch": -1},
        {"sequence": 2**63},
        {"sent_at": math.nan},
        {"started_at": math.inf},
        {"core_restarts": -1},
        {"schema_version": 2},
        {"state_reason": "x" * 501},
    ],
)
def test_f22_a_report_with_an_impossible_identity_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RefusedError):
        check_report(report(**changes), NOW)  # type: ignore[arg-type]


def _bad_histogram(**values: object) -> Callable[[], Window]:
    return lambda: Window(
        start=START,
        counters=Counters(service=ServiceCounters(ttft=Histogram(**values))),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Window(start=START + 3), "multiple"),
        (lambda: Window(start=START + 3_600_000), "future"),
        (lambda: Window(start=START - MAX_AGE_S - 20), "older"),
        (lambda: Window(start=START, gauge_sums={"running": math.nan}), r"gauge_sums\[running\]"),
        (lambda: Window(start=START, gauge_max={"": 1.0}), "key"),
        (lambda: Window(start=START, gauge_samples=-1), "gauge_samples"),
        (lambda: Window(start=START, counters=Counters(runtime=RuntimeCounters(forward_s=math.inf))), "forward_s"),
        (
            lambda: Window(
                start=START, counters=Counters(scheduling=SchedulingCounters(tenants={"": TenantService()}))
            ),
            "key",
        ),
        (lambda: Window(start=START, counters=Counters(service=ServiceCounters(received=2**60))), "received"),
        (lambda: Window(start=START, counters=Counters(service=ServiceCounters(finished={"stop": -1}))), "finished"),
        (_bad_histogram(count=3, buckets={0: 2}), "add up"),
        (_bad_histogram(count=1, buckets={500: 1}), "bucket"),
        (_bad_histogram(count=1, total=math.nan, zero=1), "total"),
    ],
)
def test_f22_a_bad_window_is_refused_with_the_place_and_the_reason(make: Callable[[], Window], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        check_window(make(), NOW)


def test_f22_the_other_windows_of_a_report_go_on() -> None:
    good, bad = engine_window(START, ttft=[0.1]), engine_window(START - 10, running=math.nan)
    rows, refused = engine_rows(report(windows=[good, bad]), NOW)
    assert [row.key.start for row in rows] == [START]
    assert len(refused) == 1 and str(START - 10) in refused[0]


def test_f22_one_bad_series_leaves_the_others() -> None:
    window = GatewayWindow(
        start=START,
        series=[series("", counters()), series("demo", counters(ttft=[0.3])), series("x" * 300, counters())],
    )
    rows, refused = gateway_rows(gateway_report([window]), NOW)
    assert [row.key.tenant for row in rows] == ["", "demo"]  # the first says that the gateway was there
    assert len(refused) == 2


def test_a_series_refused_before_routing_names_no_pool() -> None:
    check_series(series("demo", counters(), pool="", replica=""))


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt_id": ""},
        {"replica": "another"},
        {"prompt_tokens": -1},
        {"prompt_tokens": 3, "cached_tokens": 4},
        {"device_seconds": math.nan},
        {"kv_block_seconds": math.inf},
        {"finished_at": 1.0},
        {"finished_at": 1e300},
        {"tenant": "a\x00b"},
        {"model": ""},
    ],
)
def test_f22_a_usage_record_no_bill_could_carry_is_refused(changes: dict[str, object]) -> None:
    values = {"attempt_id": "attempt", **changes}
    with pytest.raises(RefusedError):
        check_usage(usage(**values), "r1")  # type: ignore[arg-type]


def test_a_direct_call_without_tenant_is_still_usage() -> None:
    check_usage(usage(tenant="", key_id="", request_id=""), "r1")
