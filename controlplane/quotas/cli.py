"""`tidegate quota`: limits, temporary raises and requests for more from the terminal, through the admin API.

Layer: service. Amounts are requests, tokens, or micro-units of money; times without a zone are UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click

from controlplane.quotas.schemas import Away, QuotaKind
from controlplane.quotas.views import RequestState
from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminApiError, AdminClient, segment
from controlplane.tenants.terminal import IDEMPOTENCY, talks

KIND = click.Choice([kind.value for kind in QuotaKind])
AMOUNT = click.IntRange(min=0)
TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"])
OPTIONAL = ("", "none", "null")


@click.group()
def quota() -> None:
    """Limit tenants, projects and keys; raise limits for a while; decide on requests for more."""


@quota.command("create")
@click.argument("tenant")
@click.argument("kind", type=KIND)
@click.option("--hard", type=AMOUNT, default=None, help="Refuse above this.")
@click.option("--soft", type=AMOUNT, default=None, help="Warn above this.")
@click.option("--project", default=None, help="Limit this project alone.")
@click.option("--key", default=None, help="Limit this key alone, also when it is rotated.")
@click.option("--model", default=None, help="Limit this model alone.")
@click.option("--away", type=click.Choice([each.value for each in Away]), default=Away.CLOSED.value, show_default=True)
@click.option("--local", type=AMOUNT, default=0, help="With --away local: what each gateway may count up to alone.")
@IDEMPOTENCY
@talks
def create_quota(
    client: AdminClient, *, as_json: bool, tenant: str, idempotency_key: str | None, **fields: Any
) -> None:
    """Limit TENANT by KIND. --away says what happens while Redis is away: closed, local or open."""
    made = client.call("POST", f"/tenants/{segment(tenant)}/quotas", fields, terminal.headers(idempotency_key))
    _show([made], as_json, single=True)
    terminal.warn_unserved(client, [fields["model"]] if fields["model"] else ())


@quota.command("list")
@click.argument("tenant")
@talks
def list_quotas(client: AdminClient, *, as_json: bool, tenant: str) -> None:
    """List the limits of TENANT, oldest first."""
    _show(list(client.pages(f"/tenants/{segment(tenant)}/quotas")), as_json)


@quota.command("show")
@click.argument("quota_id")
@talks
def show_quota(client: AdminClient, *, as_json: bool, quota_id: str) -> None:
    """Show one limit."""
    _show([client.call("GET", f"/quotas/{segment(quota_id)}")], as_json, single=True)


@quota.command("change")
@click.argument("quota_id")
@click.option("--hard", default=None, help="Refuse above this; none takes the hard limit away.")
@click.option("--soft", default=None, help="Warn above this; none takes the soft limit away.")
@click.option("--away", type=click.Choice([each.value for each in Away]), default=None)
@click.option("--local", type=AMOUNT, default=None)
@talks
def change_quota(
    client: AdminClient,
    *,
    as_json: bool,
    quota_id: str,
    hard: str | None,
    soft: str | None,
    away: str | None,
    local: int | None,
) -> None:
    """Change a limit; what is left out stays."""
    changes = terminal.given(away=away, local=local)
    for name, text in (("hard", hard), ("soft", soft)):
        if text is not None:
            changes[name] = _amount(name, text)
    terminal.require_changes(changes)
    _show([client.call("PATCH", f"/quotas/{segment(quota_id)}", changes)], as_json, single=True)


@quota.command("delete")
@click.argument("quota_id")
@talks
def delete_quota(client: AdminClient, *, as_json: bool, quota_id: str) -> None:
    """Remove a limit with its raises."""
    _show([client.call("DELETE", f"/quotas/{segment(quota_id)}")], as_json, single=True)


@quota.command("grant")
@click.argument("quota_id")
@click.argument("amount", type=click.IntRange(min=1))
@click.option("--until", type=TIME, default=None, help="In UTC; or use --hours.")
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), default=None, help="For so long from now.")
@click.option("--reason", required=True)
@IDEMPOTENCY
@talks
def grant(
    client: AdminClient,
    *,
    as_json: bool,
    quota_id: str,
    amount: int,
    until: datetime | None,
    hours: float | None,
    reason: str,
    idempotency_key: str | None,
) -> None:
    """Raise a limit by AMOUNT until then."""
    if (until is None) == (hours is None):
        raise AdminApiError("say how long: --until or --hours", usage=True)
    ends = _in_hours(hours) if hours is not None else _utc(until)
    body = {"amount": amount, "expires_at": ends.isoformat() if ends else None, "reason": reason}
    path = f"/quotas/{segment(quota_id)}/grants"
    _show_grants([client.call("POST", path, body, terminal.headers(idempotency_key))], as_json, single=True)


@quota.command("grants")
@click.argument("quota_id")
@talks
def list_grants(client: AdminClient, *, as_json: bool, quota_id: str) -> None:
    """List a limit's temporary raises, those that are over too."""
    _show_grants(list(client.pages(f"/quotas/{segment(quota_id)}/grants")), as_json)


@quota.command("end-grant")
@click.argument("quota_id")
@click.argument("grant_id")
@talks
def end_grant(client: AdminClient, *, as_json: bool, quota_id: str, grant_id: str) -> None:
    """End a raise now."""
    ended = client.call("DELETE", f"/quotas/{segment(quota_id)}/grants/{segment(grant_id)}")
    _show_grants([ended], as_json, single=True)


@quota.command("ask")
@click.argument("tenant")
@click.argument("quota_id")
@click.argument("amount", type=click.IntRange(min=1))
@click.option("--until", type=TIME, default=None, help="In UTC; for good when left out.")
@click.option("--reason", required=True)
@IDEMPOTENCY
@talks
def ask(
    client: AdminClient,
    *,
    as_json: bool,
    tenant: str,
    quota_id: str,
    amount: int,
    until: datetime | None,
    reason: str,
    idempotency_key: str | None,
) -> None:
    """Ask, for TENANT, for AMOUNT more of a limit."""
    ends = _utc(until)
    body = {"quota_id": quota_id, "amount": amount, "reason": reason, "until": ends.isoformat() if ends else None}
    path = f"/tenants/{segment(tenant)}/quota-requests"
    _show_requests([client.call("POST", path, body, terminal.headers(idempotency_key))], as_json, single=True)


@quota.command("requests")
@click.option("--tenant", default=None, help="Only this tenant's.")
@click.option("--state", type=click.Choice([each.value for each in RequestState]), default=None)
@talks
def list_requests(client: AdminClient, *, as_json: bool, tenant: str | None, state: str | None) -> None:
    """List tenants' requests for more, oldest first."""
    _show_requests(list(client.pages("/quota-requests", **terminal.given(tenant=tenant, status=state))), as_json)


@quota.command("approve")
@click.argument("request_id")
@click.option("--amount", type=click.IntRange(min=1), default=None, help="Give so much instead of what is asked.")
@click.option("--until", type=TIME, default=None, help="Until then, in UTC, instead of what is asked.")
@click.option("--for-good", is_flag=True, help="Raise the limit itself, whatever is asked.")
@click.option("--note", default="", help="What to tell the tenant.")
@talks
def approve(
    client: AdminClient,
    *,
    as_json: bool,
    request_id: str,
    amount: int | None,
    until: datetime | None,
    for_good: bool,
    note: str,
) -> None:
    """Give what a request asks for, or what the options say."""
    if until is not None and for_good:
        raise AdminApiError("say --until or --for-good, not both", usage=True)
    body: dict[str, Any] = {"note": note, **terminal.given(amount=amount)}
    if until is not None or for_good:
        ends = _utc(until)
        body["until"] = None if ends is None else ends.isoformat()
    done = client.call("POST", f"/quota-requests/{segment(request_id)}/approve", body)
    _show_requests([done], as_json, single=True)


@quota.command("decline")
@click.argument("request_id")
@click.option("--note", default="", help="What to tell the tenant.")
@talks
def decline(client: AdminClient, *, as_json: bool, request_id: str, note: str) -> None:
    """Give nothing."""
    done = client.call("POST", f"/quota-requests/{segment(request_id)}/decline", {"note": note})
    _show_requests([done], as_json, single=True)


def _amount(name: str, text: str) -> int | None:
    if text in OPTIONAL:
        return None
    try:
        return int(text)
    except ValueError:
        raise AdminApiError(f"--{name}: {text!r} is neither a whole number nor none", usage=True) from None


def _in_hours(hours: float) -> datetime:
    try:
        return datetime.now(UTC) + timedelta(hours=hours)
    except (OverflowError, ValueError):  # beyond every calendar, and not a number
        raise AdminApiError(f"--hours: {hours:g} hours from now is no time", usage=True) from None


def _utc(at: datetime | None) -> datetime | None:
    return at.replace(tzinfo=UTC) if at is not None and at.tzinfo is None else at


def _whose(row: terminal.Row) -> str:
    if row["key"] is not None:
        return f"key {row['key']}"
    return f"project {row['project']}" if row["project"] is not None else "tenant"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _show(rows: list[Any], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "id": lambda row: row["id"],
        "tenant": lambda row: row["tenant"],
        "of": _whose,
        "model": lambda row: row["model"] or "any",
        "kind": lambda row: row["kind"],
        "soft": lambda row: _or_dash(row["soft"]),
        "hard": lambda row: _or_dash(row["hard"]),
        "raised": lambda row: str(row["raised"]),
        "away": lambda row: f"local {row['local']}" if row["away"] == Away.LOCAL else row["away"],
    }
    terminal.show(rows, columns, as_json, single=single, empty="no limits yet: make one with `tidegate quota create`")


def _show_grants(rows: list[Any], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "id": lambda row: row["id"],
        "amount": lambda row: str(row["amount"]),
        "from": lambda row: terminal.moment(row["starts_at"]),
        "until": lambda row: terminal.moment(row["expires_at"]),
        "reason": lambda row: row["reason"],
        "by": lambda row: row["granted_by"],
    }
    terminal.show(rows, columns, as_json, single=single, empty="no raises yet: make one with `tidegate quota grant`")


def _show_requests(rows: list[Any], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "id": lambda row: row["id"],
        "tenant": lambda row: row["tenant"],
        "of": _whose,
        "model": lambda row: row["model"] or "any",
        "kind": lambda row: row["kind"],
        "amount": lambda row: str(row["amount"]),
        "until": lambda row: terminal.moment(row["until"]) if row["until"] else "for good",
        "reason": lambda row: row["reason"],
        "state": lambda row: row["state"],
        "given": lambda row: _or_dash(row["given"]),
        "decided by": lambda row: _or_dash(row["decided_by"]),
    }
    terminal.show(rows, columns, as_json, single=single, empty="nobody asks for more")
