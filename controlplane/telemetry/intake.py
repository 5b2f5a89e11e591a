"""What one transaction stores of a batch of reports.

Layer: service. Checks, sorts and stores; the caller's transaction commits and only then may anything be
acknowledged. Every table fences on its own, so repeats, lost acknowledgements and reports out of order store the
same rows (F28) and one bad part never holds up the rest (F22).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.fleet import service as fleet
from controlplane.fleet.live import LiveLoad
from controlplane.ledger import service as ledger
from controlplane.telemetry import refusals, repository
from controlplane.telemetry.validation import (
    RefusedError,
    check_gateway_report,
    check_report,
    check_usage,
    check_usage_time,
)
from controlplane.telemetry.windows import WindowRow, aligned, engine_rows, gateway_rows, newest
from controlplane.tenants import service as tenants
from dataplane.protocol import WINDOW_SECONDS, Command, GatewayReport, Report, ReportAck, UsageRecord

MINUTE_JOB = "rollup-60"
MAX_REASONS = 20
"""Most reasons one acknowledgement lists."""

Incoming = Report | GatewayReport


@dataclass(slots=True)
class Stored:
    """What became of a batch: an acknowledgement or a reason per report, in order, and what to tell once committed."""

    outcomes: list[ReportAck | RefusedError]
    loads: list[LiveLoad] = field(default_factory=list)
    usage: list[UsageRecord] = field(default_factory=list)
    """Attempts that were not in the ledger before."""
    refused_windows: int = 0
    refused_usage: int = 0
    late_usage: int = 0


@dataclass(slots=True)
class _Sorted:
    """The parts of one report that may be stored."""

    rows: list[WindowRow] = field(default_factory=list)
    refusals: list[refusals.RefusalRow] = field(default_factory=list)
    usage: list[UsageRecord] = field(default_factory=list)
    set_aside: list[tuple[UsageRecord, str]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)


async def store(session: AsyncSession, batch: Sequence[Incoming], now: float) -> Stored:
    """Store a batch in about ten statements, whatever its size."""
    refused: dict[int, RefusedError] = {}
    for i, report in enumerate(batch):
        try:
            check_report(report, now) if isinstance(report, Report) else check_gateway_report(report, now)
        except RefusedError as error:
            refused[i] = error
    good = {i: report for i, report in enumerate(batch) if i not in refused}
    result = Stored([])
    parts = await _replicas(session, good, now, refused, result)
    parts |= await _gateways(session, good, now)

    rows = newest(row for part in parts.values() for row in part.rows)
    changed = await repository.put_windows(session, WINDOW_SECONDS, rows)
    await refusals.put(session, [one for part in parts.values() for one in part.refusals])
    recorded = await ledger.record_from_replicas(session, [one for part in parts.values() for one in part.usage])
    result.usage, result.late_usage = recorded
    await ledger.set_aside(session, [one for part in parts.values() for one in part.set_aside])
    await repository.touch(session, MINUTE_JOB, {aligned(start, 60) for start in changed})
    epoch = await tenants.policy_epoch(session)

    for i, report in enumerate(batch):
        result.outcomes.append(refused[i] if i in refused else _acknowledge(report, parts[i], epoch))
    result.refused_usage = sum(len(part.set_aside) for part in parts.values())
    result.refused_windows = sum(len(part.reasons) for part in parts.values()) - result.refused_usage
    return result


async def _replicas(
    session: AsyncSession,
    good: dict[int, Incoming],
    now: float,
    refused: dict[int, RefusedError],
    result: Stored,
) -> dict[int, _Sorted]:
    reports = {i: report for i, report in good.items() if isinstance(report, Report)}
    intake = await fleet.take_in(session, list(reports.values()), now)
    result.loads = intake.loads
    parts = {}
    for (i, report), registration in zip(reports.items(), intake.registrations, strict=True):
        if registration.refused:
            refused[i] = RefusedError(registration.refused)
            continue
        part = _Sorted(commands=registration.commands)
        part.rows, part.reasons = engine_rows(report, now)
        for record in report.usage:
            try:
                check_usage(record, report.replica)
                check_usage_time(record, now)
            except RefusedError as error:
                part.set_aside.append((record, str(error)))
                part.reasons.append(f"usage {record.attempt_id[:40]!r}: {error}")
            else:
                part.usage.append(record)
        parts[i] = part
    return parts


async def _gateways(session: AsyncSession, good: dict[int, Incoming], now: float) -> dict[int, _Sorted]:
    reports = {i: report for i, report in good.items() if isinstance(report, GatewayReport)}
    if not reports:
        return {}
    stored = await repository.lock_gateways(session, sorted({report.gateway for report in reports.values()}))
    await repository.put_gateways(session, reports.values())
    parts = {}
    for i, report in reports.items():
        boot_epoch, sequence = stored.get(report.gateway, (report.boot_epoch, 0))
        part = _Sorted()
        part.rows, part.reasons = gateway_rows(report, now)
        part.refusals, unfit = refusals.refusal_rows(report, now)
        part.reasons += unfit
        if report.acknowledged > (sequence if boot_epoch == report.boot_epoch else 0) and not report.full:
            part.commands.append(Command(id=f"resync-{report.boot_epoch}-{report.acknowledged}", kind="resync"))
        parts[i] = part
    return parts


def _acknowledge(report: Incoming, part: _Sorted, epoch: int) -> ReportAck:
    usage = report.usage if isinstance(report, Report) else []
    reasons = part.reasons[:MAX_REASONS]
    if len(part.reasons) > MAX_REASONS:
        reasons.append(f"and {len(part.reasons) - MAX_REASONS} more")
    return ReportAck(
        sequence=report.sequence,
        usage_ids=[record.attempt_id for record in usage],
        policy_epoch=epoch,
        commands=part.commands,
        refused=reasons,
    )
