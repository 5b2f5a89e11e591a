"""`tidegate slo`: objectives from the terminal, through the admin API. Layer: service."""

from __future__ import annotations

from typing import Any

import click

from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminClient, segment
from controlplane.tenants.terminal import IDEMPOTENCY, talks

SHARE = click.FloatRange(min=0, max=1, min_open=True, max_open=True)
LATENCY = click.FloatRange(min=0, min_open=True)


@click.group()
def slo() -> None:
    """Promise latencies and availability to tenants."""


@slo.command("create")
@click.option("--tenant", default=None, help="To this tenant; to all when left out.")
@click.option("--pool", default=None, help="On this pool; on any when left out.")
@click.option("--class", "service_class", default=None, help="In this class; in any when left out.")
@click.option("--ttft", type=(click.IntRange(min=1), SHARE), default=None, help="Milliseconds and the share within.")
@click.option("--tpot", type=(LATENCY, SHARE), default=None, help="Milliseconds and the share within.")
@click.option("--availability", type=SHARE, default=None, help="Share of requests that are served.")
@click.option("--window-days", type=click.IntRange(1, 90), default=30, show_default=True)
@click.option("--disabled", is_flag=True, help="Keep it, but do not hold anybody to it yet.")
@IDEMPOTENCY
@talks
def create_slo(
    client: AdminClient,
    *,
    as_json: bool,
    tenant: str | None,
    pool: str | None,
    service_class: str | None,
    ttft: tuple[int, float] | None,
    tpot: tuple[float, float] | None,
    availability: float | None,
    window_days: int,
    disabled: bool,
    idempotency_key: str | None,
) -> None:
    """Promise something, such as --ttft 500 0.95 --availability 0.999."""
    body = {
        "tenant": tenant,
        "pool": pool,
        "class": service_class,
        "ttft_ms": ttft[0] if ttft else None,
        "ttft_share": ttft[1] if ttft else None,
        "tpot_ms": tpot[0] if tpot else None,
        "tpot_share": tpot[1] if tpot else None,
        "availability": availability,
        "window_days": window_days,
        "enabled": not disabled,
    }
    _show([client.call("POST", "/slos", body, terminal.headers(idempotency_key))], as_json, single=True)
    terminal.warn_unknown_pool(client, pool)


@slo.command("list")
@click.option("--tenant", default=None, help="Only this tenant's own.")
@talks
def list_slos(client: AdminClient, *, as_json: bool, tenant: str | None) -> None:
    """List objectives, oldest first."""
    _show(list(client.pages("/slos", **terminal.given(tenant=tenant))), as_json)


@slo.command("change")
@click.argument("slo_id")
@click.option("--ttft", type=(click.IntRange(min=1), SHARE), default=None, help="Milliseconds and the share within.")
@click.option("--tpot", type=(LATENCY, SHARE), default=None, help="Milliseconds and the share within.")
@click.option("--availability", type=SHARE, default=None)
@click.option("--window-days", type=click.IntRange(1, 90), default=None)
@click.option("--enable/--disable", "enabled", default=None)
@talks
def change_slo(
    client: AdminClient,
    *,
    as_json: bool,
    slo_id: str,
    ttft: tuple[int, float] | None,
    tpot: tuple[float, float] | None,
    **fields: Any,
) -> None:
    """Change objectives; what is left out stays."""
    changes = terminal.given(**fields)
    if ttft:
        changes |= {"ttft_ms": ttft[0], "ttft_share": ttft[1]}
    if tpot:
        changes |= {"tpot_ms": tpot[0], "tpot_share": tpot[1]}
    terminal.require_changes(changes)
    _show([client.call("PATCH", f"/slos/{segment(slo_id)}", changes)], as_json, single=True)


@slo.command("delete")
@click.argument("slo_id")
@talks
def delete_slo(client: AdminClient, *, as_json: bool, slo_id: str) -> None:
    """Remove objectives."""
    _show([client.call("DELETE", f"/slos/{segment(slo_id)}")], as_json, single=True)


def _latency(row: terminal.Row, name: str) -> str:
    limit, share = row[f"{name}_ms"], row[f"{name}_share"]
    return "-" if limit is None else f"{limit:g} ms for {share * 100:g} %"


def _show(rows: list[Any], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "id": lambda row: row["id"],
        "tenant": lambda row: row["tenant"] or "all",
        "pool": lambda row: row["pool"] or "any",
        "class": lambda row: row["class"] or "any",
        "TTFT": lambda row: _latency(row, "ttft"),
        "TPOT": lambda row: _latency(row, "tpot"),
        "available": lambda row: "-" if row["availability"] is None else f"{row['availability'] * 100:g} %",
        "window": lambda row: f"{row['window_days']} d",
        "state": lambda row: "enabled" if row["enabled"] else "disabled",
    }
    terminal.show(
        rows, columns, as_json, single=single, empty="no objectives yet: make some with `tidegate slo create`"
    )
