"""`tidegate canary`: when each limit was last proven, from the terminal, through the admin API. Layer: service."""

from __future__ import annotations

from typing import Any

import click

from controlplane.canaries.schemas import CanaryState
from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminClient
from controlplane.tenants.terminal import talks


@click.group()
def canary() -> None:
    """See when each limit was last proven, and prove them now."""


@canary.command("list")
@click.option("--state", type=click.Choice(list(CanaryState)), default=None, help="Only those in this state.")
@talks
def list_canaries(client: AdminClient, *, as_json: bool, state: str | None) -> None:
    """List canaries, by gateway, endpoint, level and kind."""
    rows = [row for row in client.pages("/canaries") if state in (None, row["state"])]
    _show(rows, as_json)


@canary.command("run")
@talks
def run_canaries(client: AdminClient, *, as_json: bool) -> None:
    """Have the worker prove all limits now; see `tidegate canary list` for what comes of it."""
    asked = client.call("POST", "/canaries/run")
    if as_json:
        terminal.print_json(asked)
    else:
        click.echo(f"asked for a run of {asked['canaries'] or 'all'} canaries; the worker begins within seconds")


def _show(rows: list[Any], as_json: bool) -> None:
    columns = {
        "gateway": lambda row: row["gateway"],
        "endpoint": lambda row: row["endpoint"],
        "level": lambda row: row["level"],
        "limit": lambda row: row["kind"],
        "state": lambda row: row["state"].replace("_", " "),
        "last proven": lambda row: _moment(row["proven_at"]),
        "last failed": lambda row: _moment(row["failed_at"]),
        "why": lambda row: row["why"],
    }
    terminal.show(rows, columns, as_json, empty="no such canary; the worker makes them when it first runs")


def _moment(text: str | None) -> str:
    return terminal.moment(text) if text else "-"
