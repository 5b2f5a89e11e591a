"""`tidegate pool` and `tidegate replica`: what serves, from the terminal, through the admin API. Layer: service."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminClient, segment
from controlplane.tenants.terminal import talks

SIZE = click.IntRange(min=0)


@click.group()
def pool() -> None:
    """List pools, and say what each of their replicas holds."""


@pool.command("list")
@talks
def list_pools(client: AdminClient, *, as_json: bool) -> None:
    """List pools, by name."""
    _show_pools(client.call("GET", "/pools"), as_json)


@pool.command("change")
@click.argument("name")
@click.option("--slots", "replica_slots", type=SIZE, default=None, help="Requests; 0 is what the replica says itself.")
@click.option("--tokens", "replica_tokens", type=SIZE, default=None, help="KV tokens; 0 is what it says itself.")
@talks
def change_pool(client: AdminClient, *, as_json: bool, name: str, **sizes: int | None) -> None:
    """Say what each replica of the pool NAME holds at once; what is left out stays."""
    changes = terminal.given(**sizes)
    terminal.require_changes(changes)
    _show_pools([client.call("PATCH", f"/pools/{segment(name)}", changes)], as_json, single=True)


@click.group()
def replica() -> None:
    """List replicas, and drain them."""


@replica.command("list")
@click.option("--pool", default=None, help="Only this pool's.")
@talks
def list_replicas(client: AdminClient, *, as_json: bool, pool: str | None) -> None:
    """List replicas with their state and load."""
    rows = [row for row in client.call("GET", "/replicas") if pool in (None, row["pool"])]
    columns = {
        "replica": lambda row: row["replica"],
        "pool": lambda row: row["pool"],
        "model": lambda row: row["model"],
        "state": lambda row: row["state"],
        "why": lambda row: row["state_reason"],
        "running": lambda row: _gauge(row, "running"),
        "waiting": lambda row: _gauge(row, "waiting"),
        "report": lambda row: "-" if row["age_s"] is None else f"{row['age_s']:.0f} s ago",
    }
    terminal.show(rows, columns, as_json, empty="no replica has registered yet")


@replica.command("drain")
@click.argument("name")
@talks
def drain(client: AdminClient, *, as_json: bool, name: str) -> None:
    """Send the replica NAME no more requests; those it has run to their end."""
    _told(client.call("POST", f"/replicas/{segment(name)}/drain"), as_json)


@replica.command("undrain")
@click.argument("name")
@talks
def undrain(client: AdminClient, *, as_json: bool, name: str) -> None:
    """Let the replica NAME serve again, within about a second."""
    _told(client.call("DELETE", f"/replicas/{segment(name)}/drain"), as_json)


def _told(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        terminal.print_json(answer)
        return
    wanted = "is to be drained" if answer["drain_wanted"] else "is to serve"
    click.echo(f"{answer['replica']} {wanted}; it is {answer['state']} now")


def _show_pools(rows: list[Any], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "pool": lambda row: row["name"],
        "model": lambda row: row["model"],
        "backend": lambda row: row["backend"],
        "slots": lambda row: _size(row["replica_slots"]),
        "tokens": lambda row: _size(row["replica_tokens"]),
        "created": lambda row: f"{datetime.fromtimestamp(row['created_at'], UTC):%Y-%m-%d %H:%MZ}",
    }
    terminal.show(rows, columns, as_json, single=single, empty="no pools yet: a replica that registers makes its own")


def _size(said: int) -> str:
    return str(said) if said else "as told"


def _gauge(row: dict[str, Any], name: str) -> str:
    return "-" if row["gauges"] is None else str(row["gauges"][name])
