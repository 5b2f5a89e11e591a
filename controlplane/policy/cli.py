"""`tidegate policy`: which policy is in force where, what changed, and taking a change back, through the admin API.

Layer: service.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import click

from controlplane.policy.views import PolicyObject
from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminClient, segment
from controlplane.tenants.terminal import talks

MOST = 200
"""Changes listed; the API pages through all."""


@click.group()
def policy() -> None:
    """Show the policy's epoch everywhere, list changes, take one back."""


@policy.command("show")
@talks
def show(client: AdminClient, *, as_json: bool) -> None:
    """Show the epoch in force on every gateway and replica."""
    found = client.call("GET", "/policy")
    if as_json:
        terminal.show([found], {}, True, single=True, empty="")
        return
    click.echo(f"The policy is at epoch {found['epoch']} since {terminal.moment(found['changed_at'])}.")
    columns = {
        "holder": lambda row: f"{row['kind']} {row['name']}",
        "epoch": lambda row: str(row["epoch"]),
        "state": lambda row: row["state"],
        "behind": lambda row: str(row["behind"]),
        "for s": lambda row: "-" if row["for_s"] is None else f"{row['for_s']:.0f}",
        "last report s": lambda row: f"{row['report_age_s']:.0f}",
    }
    terminal.show(found["holders"], columns, False, empty="no gateway and no replica has reported yet")


@policy.command("changes")
@click.option("--tenant", default=None, help="Only this tenant's.")
@click.option("--kind", type=click.Choice([each.value for each in PolicyObject]), default=None)
@click.option("--limit", type=click.IntRange(1, MOST), default=50, show_default=True, help="The newest so many.")
@talks
def changes(client: AdminClient, *, as_json: bool, tenant: str | None, kind: str | None, limit: int) -> None:
    """List changes, newest first."""
    query = urlencode(terminal.given(tenant=tenant, kind=kind, limit=limit))
    _show(client.call("GET", f"/policy/changes?{query}")["items"], as_json)


@policy.command("rollback")
@click.argument("change_id", type=click.IntRange(min=1))
@talks
def rollback(client: AdminClient, *, as_json: bool, change_id: int) -> None:
    """Take one change back, unless the row has changed since."""
    _show([client.call("POST", f"/policy/changes/{segment(str(change_id))}/rollback")], as_json, single=True)


def _show(rows: list[Any], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "id": lambda row: str(row["id"]),
        "at": lambda row: terminal.moment(row["at"]),
        "who": lambda row: row["who"],
        "what": lambda row: f"{row['object']} {row['row_id']}",
        "tenant": lambda row: row["tenant"] or "-",
        "change": _difference,
        "epoch": lambda row: str(row["epoch"]),
        "takes back": lambda row: "-" if row["restores"] is None else str(row["restores"]),
    }
    terminal.show(rows, columns, as_json, single=single, empty="nothing has changed yet")


def _difference(row: terminal.Row) -> str:
    before, after = row["before"], row["after"]
    if before is None or after is None:
        return "made" if before is None else "removed"
    names = [name for name in after if before.get(name) != after[name] and name != "updated_at"]
    return ", ".join(f"{name}: {before.get(name)} → {after[name]}" for name in names)
