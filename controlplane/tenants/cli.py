"""`tidegate tenant`: tenants from the terminal, through the admin API. Layer: service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminClient, segment
from controlplane.tenants.terminal import ANY_MODEL, IDEMPOTENCY, METADATA, MODEL, NO_METADATA, talks

TIME_ZONE = click.option("--time-zone", default=None, help="Where its days and months begin, such as Europe/Berlin.")
WEIGHT = click.option("--weight", type=float, default=None, help="Share of a busy pool relative to others; 1 at first.")
FLOOR = click.option(
    "--floor", "floor_tokens_per_s", type=float, default=None, help="Tokens/s that a flood of others never takes."
)


@click.group()
def tenant() -> None:
    """Create, list and change tenants."""


@tenant.command("create")
@click.argument("slug")
@click.option("--name", default=None, help="Display name; the slug when left out.")
@MODEL
@click.option("--priority", type=int, default=0, show_default=True, help="Lower goes first.")
@TIME_ZONE
@WEIGHT
@FLOOR
@METADATA
@IDEMPOTENCY
@talks
def create_tenant(
    client: AdminClient,
    *,
    as_json: bool,
    slug: str,
    name: str | None,
    models: Sequence[str],
    priority: int,
    time_zone: str | None,
    weight: float | None,
    floor_tokens_per_s: float | None,
    metadata: Sequence[str],
    idempotency_key: str | None,
) -> None:
    """Create the tenant SLUG: 1 to 40 lower-case letters, digits and hyphens."""
    terminal.check_slug(slug)
    body = {
        "slug": slug,
        "name": name or slug,
        "priority": priority,
        "allowed_models": list(models) or None,
        "metadata": terminal.pairs(metadata),
        **terminal.given(time_zone=time_zone, weight=weight, floor_tokens_per_s=floor_tokens_per_s),
    }
    _show([client.call("POST", "/tenants", body, terminal.headers(idempotency_key))], as_json, single=True)
    terminal.warn_unserved(client, models)


@tenant.command("list")
@talks
def list_tenants(client: AdminClient, *, as_json: bool) -> None:
    """List all tenants, oldest first."""
    rows = list(client.pages("/tenants"))
    _show(rows, as_json)
    terminal.warn_unserved(client, [model for row in rows for model in row["allowed_models"] or ()])


@tenant.command("show")
@click.argument("slug")
@talks
def show_tenant(client: AdminClient, *, as_json: bool, slug: str) -> None:
    """Show the tenant SLUG."""
    shown = client.call("GET", f"/tenants/{segment(slug)}")
    _show([shown], as_json, single=True)
    terminal.warn_unserved(client, shown["allowed_models"] or ())


@tenant.command("change")
@click.argument("slug")
@click.option("--name", default=None, help="Display name.")
@MODEL
@ANY_MODEL
@click.option("--priority", type=int, default=None, help="Lower goes first.")
@TIME_ZONE
@WEIGHT
@FLOOR
@METADATA
@NO_METADATA
@talks
def change_tenant(
    client: AdminClient,
    *,
    as_json: bool,
    slug: str,
    models: Sequence[str],
    any_model: bool,
    metadata: Sequence[str],
    no_metadata: bool,
    **fields: Any,
) -> None:
    """Change the tenant SLUG; what is left out stays."""
    changes = terminal.given(**fields) | terminal.narrowing(models, any_model, metadata, no_metadata)
    terminal.require_changes(changes)
    _show([client.call("PATCH", f"/tenants/{segment(slug)}", changes)], as_json, single=True)
    terminal.warn_unserved(client, models)


@tenant.command("deactivate")
@click.argument("slug")
@talks
def deactivate_tenant(client: AdminClient, *, as_json: bool, slug: str) -> None:
    """Refuse all keys of SLUG, within two seconds."""
    _show([client.call("PATCH", f"/tenants/{segment(slug)}", {"active": False})], as_json, single=True)


@tenant.command("activate")
@click.argument("slug")
@talks
def activate_tenant(client: AdminClient, *, as_json: bool, slug: str) -> None:
    """Accept the keys of SLUG again."""
    _show([client.call("PATCH", f"/tenants/{segment(slug)}", {"active": True})], as_json, single=True)


def _show(rows: Sequence[dict[str, Any]], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "slug": lambda row: row["slug"],
        "name": lambda row: row["name"],
        "state": terminal.state,
        "models": terminal.models,
        "priority": lambda row: str(row["priority"]),
        "weight": lambda row: f"{row['weight']:.15g}",
        "floor tokens/s": lambda row: f"{row['floor_tokens_per_s']:.15g}",
        "time zone": lambda row: row["time_zone"],
        "metadata": terminal.metadata,
        "created": terminal.created,
    }
    terminal.show(
        rows, columns, as_json, single=single, empty="no tenants yet: create one with `tidegate tenant create SLUG`"
    )
