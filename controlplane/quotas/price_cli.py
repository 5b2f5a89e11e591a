"""`tidegate price`: what use of pools costs, from the terminal, through the admin API.

Layer: service. Amounts are micro-units of money: per million tokens, and per second of device time.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminClient, segment
from controlplane.tenants.terminal import IDEMPOTENCY, talks

RATE = click.IntRange(min=0)
TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"])


@click.group()
def price() -> None:
    """Set and list prices of pools."""


@price.command("set")
@click.option("--pool", default=None, help="For this pool; for every pool without its own when left out.")
@click.option("--uncached-input", type=RATE, required=True, help="Per million tokens, in micro-units.")
@click.option("--cached-input", type=RATE, required=True, help="Per million tokens, in micro-units.")
@click.option("--output", type=RATE, required=True, help="Per million tokens, in micro-units.")
@click.option("--device-second", type=RATE, default=0, show_default=True, help="Per second, in micro-units.")
@click.option("--from", "valid_from", type=TIME, default=None, help="In UTC; now when left out.")
@IDEMPOTENCY
@talks
def set_price(
    client: AdminClient,
    *,
    as_json: bool,
    valid_from: datetime | None,
    idempotency_key: str | None,
    **amounts: Any,
) -> None:
    """Set a price; it ends the one before. What has been in force never changes."""
    start = valid_from.replace(tzinfo=UTC).isoformat() if valid_from else None
    made = client.call("POST", "/prices", {**amounts, "valid_from": start}, terminal.headers(idempotency_key))
    _show([made], as_json, single=True)
    terminal.warn_unknown_pool(client, amounts["pool"])


@price.command("list")
@click.option("--pool", default=None, help='Only this pool\'s; "" for the price of every pool.')
@click.option("--in-force", is_flag=True, help="Only those in force now.")
@talks
def list_prices(client: AdminClient, *, as_json: bool, pool: str | None, in_force: bool) -> None:
    """List prices, newest first."""
    at = datetime.now(UTC).isoformat() if in_force else None
    _show(list(client.pages("/prices", **terminal.given(pool=pool, at=at))), as_json)


@price.command("take-back")
@click.argument("price_id")
@talks
def take_back(client: AdminClient, *, as_json: bool, price_id: str) -> None:
    """Take back a price that is yet to start."""
    _show([client.call("DELETE", f"/prices/{segment(price_id)}")], as_json, single=True)


def _show(rows: list[Any], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "id": lambda row: row["id"],
        "pool": lambda row: row["pool"] or "every",
        "uncached input": lambda row: str(row["uncached_input"]),
        "cached input": lambda row: str(row["cached_input"]),
        "output": lambda row: str(row["output"]),
        "device second": lambda row: str(row["device_second"]),
        "from": lambda row: terminal.moment(row["valid_from"]),
        "until": lambda row: terminal.moment(row["valid_until"]) if row["valid_until"] else "-",
        "by": lambda row: row["set_by"],
    }
    terminal.show(rows, columns, as_json, single=single, empty="no prices yet: set one with `tidegate price set`")
