"""One fault after the other under load, and after each what must hold.

Layer: service. It drives and measures; what must hold is decided by `checks`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from controlplane.lab.bench.report import Report, Section, Table
from controlplane.lab.chaos import books, checks
from controlplane.lab.chaos.checks import NO_DIFFERENCE, Answers, Difference, Standing
from controlplane.lab.chaos.deployment import LEASE_TTL_S, Deployment
from controlplane.lab.chaos.faults import FAULTS, Fault
from controlplane.lab.chaos.load import Load, summed
from controlplane.lab.chaos.watch import Watch
from controlplane.local.errors import LocalError
from controlplane.tenants.admin_client import AdminApiError

RATE, QUICK_RATE = 24.0, 12.0
"""Requests a second, all gateways together."""
WARM_S, QUIET_S = 4.0, 3.0
RECOVERED_WITHIN_S = 60.0
FREED_WITHIN_S = LEASE_TTL_S + 4.0
LEDGER_WITHIN_S = 60.0


@dataclass(slots=True)
class Finding:
    """What one fault did. `recovered_s` runs from when the fault was lifted."""

    name: str
    what: str
    answers: Answers = field(default_factory=Answers)
    difference: Difference = NO_DIFFERENCE
    leaked: int | None = None
    freed_s: float = 0.0
    recovered_s: float | None = None
    states: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    skipped: str = ""


def run(*, only: Collection[str], quick: bool, seed: int, console: Console, tell: Callable[[str], None]) -> Report:
    """Inject `only`, or all. Raises LocalError when the deployment does not start."""
    rate = QUICK_RATE if quick else RATE
    case = {"quick": quick, "requests_per_s": rate, "lease_ttl_s": LEASE_TTL_S}
    report = Report("chaos", case, seed)
    chosen = [fault for fault in FAULTS if not only or fault.name in only]
    findings = []
    with Deployment(console) as deployment, _watching(deployment) as watch:
        for number, fault in enumerate(chosen):
            reason = fault.missing()
            if reason:
                tell(f"{fault.name} is skipped: {reason}")
                findings.append(Finding(fault.name, fault.what, skipped=reason))
                continue
            tell(fault.what)
            load = Load(deployment.targets, rate, seed * 1000 + number)
            findings.append(_one(deployment, watch, load, fault, fault.seconds[quick]))
    report.take(section(findings))
    return report


def failed(report: Report) -> bool:
    """Something did not hold."""
    return any(finding["problems"] for finding in report.results["faults"].values())


def _watching(deployment: Deployment) -> Watch:
    home = deployment.stack.home
    return Watch(
        deployment.gateway_ports,
        deployment.ports.control,
        metrics_token=home.secret("metrics").reveal(),
        api_token=deployment.api_token,
        replicas=len(deployment.stack.engine_ports),
    )


def _one(deployment: Deployment, watch: Watch, load: Load, fault: Fault, seconds: float) -> Finding:
    finding = Finding(fault.name, fault.what)
    deployment.until(lambda: not watch.now and watch.looks > 0, RECOVERED_WITHIN_S)
    with load:
        deployment.turn(WARM_S)
        watch.take()
        try:
            fault.inject(deployment, seconds)
        except LocalError as error:
            finding.problems.append(f"it could not be injected: {error.message}")
        lifted = time.monotonic()
        quiet = deployment.until(lambda: _quiet(watch, load, lifted), RECOVERED_WITHIN_S)
        finding.states = tuple(sorted(watch.take()))
        last = max((one.sent_at for one in load.ended if one.disturbed), default=0.0)
        if quiet:
            finding.recovered_s = max(0.0, max(last, watch.wrong_at) - lifted)
        else:
            shown = ", ".join(sorted(watch.now)) or "nothing"
            finding.problems.append(f"shown in the end: {shown}; last disturbed {time.monotonic() - last:.0f} s before")
    stopped = time.monotonic()
    finding.answers = summed(load.ended)
    standings = _freed(deployment, watch, finding)
    finding.freed_s = time.monotonic() - stopped
    finding.difference = _settled(deployment)
    finding.problems += [
        *checks.answers(finding.answers, fault.allowed),
        *checks.states(finding.states, fault.expected),
        *checks.recovery(finding.recovered_s, RECOVERED_WITHIN_S),
        *checks.counters(standings),
        *checks.in_flight(finding.leaked, finding.freed_s, LEASE_TTL_S),
        *finding.difference.problems,
    ]
    return finding


def _quiet(watch: Watch, load: Load, lifted: float) -> bool:
    """Nothing has been wrong for `QUIET_S`."""
    since = time.monotonic() - QUIET_S
    if since < lifted or watch.now or watch.wrong_at > since:
        return False
    return not any(one.disturbed for one in load.ended if one.sent_at > since)


def _freed(deployment: Deployment, watch: Watch, finding: Finding) -> list[Standing]:
    """Wait until nothing is counted as in flight or leases have surely expired; where the counters stand then."""
    standings: list[Standing] = []

    def free() -> bool:
        nonlocal standings
        standings = asyncio.run(books.standings(deployment.settings))
        gateways = watch.gauge("tidegate_gateway_in_flight")
        held, waiting = (
            watch.gauge(f"tidegate_gateway_{name}") for name in ("leases_in_flight", "lease_endings_waiting")
        )
        if not standings or any(len(each) < len(deployment.gateway_ports) for each in (gateways, held, waiting)):
            return False
        gateways |= {f"{name} leases": one for name, one in held.items()}
        finding.leaked = checks.leak(standings, gateways, waiting)
        return finding.leaked == 0

    deployment.until(free, FREED_WITHIN_S)
    return standings


def _settled(deployment: Deployment) -> Difference:
    """Ledger against engines, once everything has been reported, or after `LEDGER_WITHIN_S`."""
    found = Difference(0, 0, 0, ("the ledger could not be read",))

    def agree() -> bool:
        nonlocal found
        try:
            rows = books.ledger(deployment.admin, deployment.begun_at)
        except AdminApiError as error:
            found = Difference(0, 0, 0, (f"the ledger could not be read: {error.message}",))
            return False
        found = checks.compare(books.engines(deployment.records()), rows)
        return not found.problems

    deployment.until(agree, LEDGER_WITHIN_S)
    return found


def section(findings: Sequence[Finding]) -> Section:
    """One table, and the same as plain results under `faults`."""
    rows = tuple(_row(finding) for finding in findings)
    table = Table(
        "Chaos: each fault under load",
        (
            "fault",
            "requests",
            "ok",
            "refused by kind",
            "cut",
            "no answer",
            "401",
            "ledger − engines",
            "worst leak",
            "recovered s",
            "states seen",
            "held",
        ),
        rows,
        "ledger − engines: tokens over all attempts so far (attempts; + told by gateways alone); worst leak: in flight "
        f"when idle, within {FREED_WITHIN_S:g} s",
    )
    results: dict[str, Any] = {"faults": {finding.name: _plain(finding) for finding in findings}}
    return Section([table], results)


def _row(finding: Finding) -> tuple[str, ...]:
    if finding.skipped:
        return (finding.name, *[""] * 9, finding.skipped, "skipped")
    answers, difference = finding.answers, finding.difference
    refused = ", ".join(f"{code} × {number}" for code, number in sorted(answers.refused.items()))
    others = f" + {difference.told_by_others}" if difference.told_by_others else ""
    return (
        finding.name,
        f"{answers.requests:,}",
        f"{answers.ok:,}",
        refused or "none",
        str(answers.cut),
        str(answers.unanswered),
        str(answers.unauthorised),
        f"{difference.tokens:+,} ({difference.attempts:,}{others})" if difference.tokens else
        f"0 ({difference.attempts:,}{others})",
        "unknown" if finding.leaked is None else str(finding.leaked),
        "not" if finding.recovered_s is None else f"{finding.recovered_s:.1f}",
        ", ".join(finding.states) or "none",
        "yes" if not finding.problems else "NO: " + "; ".join(finding.problems),
    )  # fmt: skip


def _plain(finding: Finding) -> dict[str, Any]:
    plain = asdict(finding)
    plain["answers"]["refused"] = dict(finding.answers.refused)
    return plain
