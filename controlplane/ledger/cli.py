"""`tidegate usage`: sums, statements and exports from the terminal, through the admin API.

Layer: service. Prints tables, or JSON with --json; an export goes to a file or to standard output, byte for byte.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from controlplane.ledger.schemas import ExportFormat, UsageDimension
from controlplane.tenants.admin_client import AdminApiError, AdminClient, segment
from controlplane.tenants.terminal import print_json, print_table, talks

_MOMENT = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"])
_MICRO = 1_000_000


def _span(command: Callable[..., None]) -> Callable[..., None]:
    since = click.option("--since", type=_MOMENT, required=True, help="First instant, in UTC.")
    until = click.option("--until", type=_MOMENT, required=True, help="First instant after it, in UTC.")
    tenant = click.option("--tenant", default=None, help="Only this tenant's.")
    return since(until(tenant(command)))


@click.group()
def usage() -> None:
    """Sum, export and bill what tenants used."""


@usage.command("totals")
@_span
@click.option(
    "--by", type=click.Choice([*map(str, UsageDimension)]), default=str(UsageDimension.TENANT), show_default=True
)
@talks
def totals(
    client: AdminClient, *, as_json: bool, since: datetime, until: datetime, tenant: str | None, by: str
) -> None:
    """Sum the attempts that finished in a span; the last column tells how many were canaries of the platform."""
    rows = client.call("GET", f"/usage/totals?{_query(since, until, tenant, by=by)}")
    if as_json:
        print_json(rows)
        return
    keys = {"tenant": "tenant", by: "key"} if by == UsageDimension.PROJECT else {by: "key"}
    lines = [
        (*(row[key] or "none" for key in keys.values()), *_used(row), _money(row), str(row["canaries"]["attempts"]))
        for row in rows
    ]
    print_table((*keys, *_USED, "cost", "of canaries"), lines, empty="no usage in this span")


@usage.command("statement")
@click.argument("tenant")
@click.argument("month")
@talks
def statement(client: AdminClient, *, as_json: bool, tenant: str, month: str) -> None:
    """Show TENANT's usage and cost in MONTH (2026-11), a calendar month of the tenant's time zone."""
    found = client.call("GET", f"/tenants/{segment(tenant)}/statements/{segment(month)}")
    if as_json:
        print_json(found)
        return
    keys = ("project", "key_id", "model", "pool")
    lines = [(*(row[key] or "none" for key in keys), *_used(row), _money(row)) for row in found["lines"]]
    if lines:
        lines.append(("total", "", "", "", *_used(found["total"]), _money(found["total"])))
    print_table(("project", "key", "model", "pool", *_USED, "cost"), lines, empty="no usage in this month")
    if unpriced := found["total"]["unpriced_attempts"]:
        click.echo(f"{unpriced} attempts have no price: none was in force when they arrived", err=True)


@usage.command("export")
@_span
@click.option(
    "--format",
    "file_format",
    type=click.Choice([*map(str, ExportFormat)]),
    default=str(ExportFormat.CSV),
    show_default=True,
)
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), default=None, help="File; standard output else."
)
@talks
def export(
    client: AdminClient,
    *,
    as_json: bool,
    since: datetime,
    until: datetime,
    tenant: str | None,
    file_format: str,
    output: Path | None,
) -> None:
    """Write every attempt that finished in a span, oldest first."""
    if as_json:
        raise AdminApiError("an export is csv or parquet: see --format", usage=True)
    path = f"/usage/export?{_query(since, until, tenant, format=file_format)}"
    if output is None:
        client.download(path, sys.stdout.buffer.write)
        sys.stdout.buffer.flush()
        return
    unfinished = output.with_name(f"{output.name}.part")
    try:
        with unfinished.open("wb") as file:
            client.download(path, file.write)
        unfinished.replace(output)
    except OSError as error:
        raise AdminApiError(f"cannot write {output}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):  # it is not there when all went well
            unfinished.unlink()


_USED = ("attempts", "uncached", "cached", "output", "KV block s", "device s")


def _used(row: dict[str, Any]) -> Sequence[str]:
    counts = (str(row[name]) for name in ("attempts", "uncached_tokens", "cached_tokens", "output_tokens"))
    return (*counts, *(f"{row[name]:.3f}" for name in ("kv_block_seconds", "device_seconds")))


def _money(row: dict[str, Any]) -> str:
    return f"{row['cost'] // _MICRO}.{row['cost'] % _MICRO:06d}"


def _query(since: datetime, until: datetime, tenant: str | None, **more: str) -> str:
    span = {"since": since.replace(tzinfo=UTC).isoformat(), "until": until.replace(tzinfo=UTC).isoformat()}
    return urlencode({**span, **({"tenant": tenant} if tenant else {}), **more})
