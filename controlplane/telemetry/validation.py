"""What of a report may be stored: refuses numbers that would poison every later sum.

Layer: service. Pure checks over wire structs that msgspec has already typed. One bad window, series or usage
record is refused with its reason and the rest goes on (F22); nothing here repairs or guesses a value.
"""

from __future__ import annotations

from typing import Any

import msgspec

from controlplane.egress import TargetRefusedError, parse_target
from controlplane.ledger.retention import DAY_S, MOST_AHEAD_S, OLDEST_RECORD_S
from dataplane.protocol import (
    LATEST_REFUSED,
    SCHEMA_VERSION,
    WINDOW_SECONDS,
    GatewayRefusals,
    GatewayReport,
    GatewaySeries,
    GatewayWindow,
    Histogram,
    Report,
    UsageRecord,
    Window,
)

MAX_NAME = 200
"""Longest id, name or dict key, in characters."""
MAX_TEXT = 500
"""Longest free text (a state's reason, a URL)."""
MAX_ITEMS = 20_000
"""Most entries of one dict or list inside the counters (layer × expert arrays come to this)."""
MAX_WINDOWS = 400
MAX_SERIES = 200_000
MAX_USAGE = 2_000
MAX_COUNT = 2**53
"""Counts above this do not survive a float; no honest reporter gets there within one window."""
MAX_AMOUNT = 1e30
"""Largest float: seconds, bytes and FLOPs of one window stay far below."""
MAX_EPOCH = 2**63 - 1
"""Epochs may be nanoseconds; they are compared, never added."""
EPOCH_AHEAD_S = 86_400.0
"""A boot epoch, in milliseconds, may be this far in the future: a clock that was set back keeps its epochs growing. No
report of a real boot is fenced for longer, whatever was claimed."""
MAX_RATE = 20.0
SEQUENCES_AT_ONCE = 10_000
"""A sequence may be this high at once and grow this fast (1/s): whoever claims more would fence the reports to come."""
MAX_AHEAD_S = 60
"""A window may start this far in the future: clocks differ a little."""
MAX_AGE_S = 23 * 3600
"""An older window is past the time 10 s rows are kept for, and its minute is already final."""


class RefusedError(ValueError):
    """A report, or a part of it, that is not stored; the message is the reason."""


def check_report(report: Report, now: float) -> None:
    """Refuse a report whose identity cannot be trusted. Raises RefusedError."""
    _version(report.schema_version)
    for field in ("replica", "pool", "model"):
        _name(field, getattr(report, field))
    _fencing(report, now)
    _text("state_reason", report.state_reason)
    _url(report.url)
    _epochs(report, "core_epoch", "policy_epoch")
    _count("core_restarts", report.core_restarts)
    _walk("gauges", report.gauges)
    if report.ready is not None:
        _walk("ready", report.ready)
    if len(report.windows) > MAX_WINDOWS or len(report.usage) > MAX_USAGE:
        raise RefusedError(f"a report carries at most {MAX_WINDOWS} windows and {MAX_USAGE} usage records")


def check_gateway_report(report: GatewayReport, now: float) -> None:
    """Refuse a gateway report whose identity cannot be trusted. Raises RefusedError."""
    _version(report.schema_version)
    _name("gateway", report.gateway)
    _fencing(report, now)
    _epochs(report, "policy_epoch")
    _count("in_flight", report.in_flight)
    _count("spool_bytes", report.spool_bytes)
    if not 0 <= report.spool_oldest_at <= _LAST_SECOND:
        raise RefusedError(f"spool_oldest_at {report.spool_oldest_at} is not a time")
    parts = sum(len(window.series) + len(window.refusals) for window in report.windows)
    if len(report.windows) > MAX_WINDOWS or parts > MAX_SERIES:
        raise RefusedError(f"a report carries at most {MAX_WINDOWS} windows and {MAX_SERIES} series")


def check_window(window: Window, now: float) -> None:
    """Refuse an engine window with an impossible start or a number that is not one. Raises RefusedError."""
    check_start(window.start, now)
    _walk("counters", window.counters)
    _walk("gauge_sums", window.gauge_sums)
    _walk("gauge_max", window.gauge_max)
    _count("gauge_samples", window.gauge_samples)


def check_gateway_window(window: GatewayWindow, now: float) -> None:
    check_start(window.start, now)


def check_series(series: GatewaySeries) -> None:
    """Refuse one gateway series. Its pool and replica may be empty (refused before routing), its tenant may not."""
    _name("tenant", series.tenant)
    for field in ("pool", "replica"):
        if getattr(series, field):
            _name(field, getattr(series, field))
    _walk("counters", series.counters)


def check_refusals(refusals: GatewayRefusals) -> None:
    """Refuse what a gateway says of one tenant's refused requests. Raises RefusedError."""
    for field in ("tenant", "code"):
        _name(field, getattr(refusals, field))
    for field in ("quota_id", "kind"):
        if getattr(refusals, field):
            _name(field, getattr(refusals, field))
    _walk("refusals", refusals)
    if len(refusals.latest) > LATEST_REFUSED:
        raise RefusedError(f"a window keeps at most {LATEST_REFUSED} refused requests of one reason")
    if any(not 0 <= one.at <= _LAST_SECOND for one in refusals.latest):
        raise RefusedError("a refused request came at no time")


def check_usage(record: UsageRecord, replica: str) -> None:
    """Refuse a usage record that no bill could carry. Raises RefusedError.

    Tenant, key and request may be empty (a direct call with the internal token); the rest may not.
    """
    for field in ("attempt_id", "pool", "model", "replica", "finish"):
        _name(field, getattr(record, field))
    for field in ("request_id", "tenant", "key_id", "project"):
        if getattr(record, field):
            _name(field, getattr(record, field))
    if record.replica != replica:
        raise RefusedError(f"usage record names replica {record.replica!r} but came from {replica!r}")
    _walk("usage", record)
    if record.cached_tokens > record.prompt_tokens:
        raise RefusedError("usage record has more cached than prompt tokens")
    if not 0 < record.started_at <= record.finished_at <= _LAST_SECOND:
        raise RefusedError("usage record ends before it starts")


def check_usage_time(record: UsageRecord, now: float) -> None:
    """Refuse a usage record from beyond the time within which it can be told from one stored before. Raises
    RefusedError.
    """
    if record.finished_at < now - OLDEST_RECORD_S:
        raise RefusedError(f"usage record finished more than {OLDEST_RECORD_S // DAY_S} days ago")
    if record.finished_at > now + MOST_AHEAD_S:
        raise RefusedError("usage record finished in the future")


def check_start(start: int, now: float) -> None:
    """A window starts on a multiple of `WINDOW_SECONDS`, not in the far future and not past retention."""
    if start % WINDOW_SECONDS:
        raise RefusedError(f"window start {start} is not a multiple of {WINDOW_SECONDS} s")
    if start > now + MAX_AHEAD_S:
        raise RefusedError(f"window start {start} lies in the future")
    if start < now - MAX_AGE_S:
        raise RefusedError(f"window start {start} is older than what is kept")


_LAST_SECOND = 253_402_300_799
"""The last second of year 9999: what a timestamp column can hold."""


def _version(version: int) -> None:
    if version != SCHEMA_VERSION:
        raise RefusedError(f"schema version {version} is not {SCHEMA_VERSION}, which this control plane reads")


def _fencing(report: Report | GatewayReport, now: float) -> None:
    """What later reports are compared with: a claim far ahead would fence the real ones (F34)."""
    _epochs(report, "boot_epoch", "sequence", "acknowledged")
    if report.boot_epoch > (now + EPOCH_AHEAD_S) * 1000:
        raise RefusedError(f"boot_epoch {report.boot_epoch} (milliseconds) lies in the future")
    running_s = max(0.0, now - report.boot_epoch / 1000)
    if report.sequence > SEQUENCES_AT_ONCE + MAX_RATE * running_s:
        raise RefusedError(f"sequence {report.sequence} is more than the reports there can have been since the boot")
    for field in ("sent_at", "started_at"):
        value = getattr(report, field)
        if not 0 <= value <= _LAST_SECOND:
            raise RefusedError(f"{field} {value} is not a time")


def _epochs(report: Report | GatewayReport, *fields: str) -> None:
    for field in fields:
        value = getattr(report, field)
        if not 0 <= value <= MAX_EPOCH:
            raise RefusedError(f"{field} {value} is out of range")


def _name(field: str, value: str) -> None:
    if not value or len(value) > MAX_NAME or not value.isprintable():
        raise RefusedError(f"{field} must be 1 to {MAX_NAME} printable characters")


def _text(field: str, value: str) -> None:
    if len(value) > MAX_TEXT or "\x00" in value:
        raise RefusedError(f"{field} must be at most {MAX_TEXT} characters")


def _url(value: str) -> None:
    try:
        parse_target(value)
    except TargetRefusedError as error:
        raise RefusedError(f"url is refused: {error}") from None


def _count(path: str, value: float) -> None:
    if not 0 <= value <= MAX_COUNT:
        raise RefusedError(f"{path} is {value!r}, not a number from 0 to 2^53")


def _walk(path: str, value: Any) -> None:
    """Every number below `value` is in range, every name and list is bounded, every histogram adds up.

    A path is put together only when something is refused: this runs over every number of every report.
    """
    try:
        _inspect(value)
    except _UnfitError as error:
        raise RefusedError(path + error.where + error.why) from None


class _UnfitError(Exception):
    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.where = ""

    def under(self, step: str) -> _UnfitError:
        self.where = step + self.where
        return self


def _inspect(value: Any) -> None:
    if value is None or value == 0:
        return
    if isinstance(value, (int, float)):
        if not 0 <= value <= (MAX_AMOUNT if isinstance(value, float) else MAX_COUNT):  # false for NaN and infinity
            raise _UnfitError(f" is {value!r}, not a number from 0 to 2^53")
    elif isinstance(value, str):
        if len(value) > MAX_TEXT or "\x00" in value:
            raise _UnfitError(f" is longer than {MAX_TEXT} characters")
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            item = getattr(value, field)
            if field.endswith("_epoch") and 0 <= item <= MAX_EPOCH:
                continue
            try:
                _inspect(item)
            except _UnfitError as error:
                raise error.under(f".{field}") from None
        if isinstance(value, Histogram):
            _histogram(value)
    else:
        _entries(value)


def _entries(value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> None:
    if len(value) > MAX_ITEMS:
        raise _UnfitError(f" has more than {MAX_ITEMS} entries")
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        if isinstance(key, str) and not (0 < len(key) <= MAX_NAME and key.isprintable()):
            raise _UnfitError(f" has a key that is not 1 to {MAX_NAME} printable characters")
        try:
            _inspect(item)
        except _UnfitError as error:
            raise error.under(f"[{key}]") from None


def _histogram(histogram: Histogram) -> None:
    if any(not Histogram.MIN_INDEX < index <= Histogram.MAX_INDEX for index in histogram.buckets):
        raise _UnfitError(f" has a bucket outside {Histogram.MIN_INDEX + 1}..{Histogram.MAX_INDEX}")
    if histogram.count != histogram.zero + histogram.over + sum(histogram.buckets.values()):
        raise _UnfitError(f" does not add up: its count {histogram.count} is not the sum of its buckets")
