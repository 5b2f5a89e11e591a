"""`tidegate project`: a tenant's projects from the terminal, through the admin API. Layer: service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminClient, segment
from controlplane.tenants.terminal import ANY_MODEL, IDEMPOTENCY, METADATA, MODEL, NO_METADATA, talks


@click.group()
def project() -> None:
    """Create, list and change the projects of a tenant."""


@project.command("create")
@click.argument("tenant")
@click.argument("slug")
@click.option("--name", default=None, help="Display name; the slug when left out.")
@MODEL
@METADATA
@IDEMPOTENCY
@talks
def create_project(
    client: AdminClient,
    *,
    as_json: bool,
    tenant: str,
    slug: str,
    name: str | None,
    models: Sequence[str],
    metadata: Sequence[str],
    idempotency_key: str | None,
) -> None:
    """Create the project SLUG of TENANT: 1 to 40 lower-case letters, digits and hyphens."""
    terminal.check_slug(slug)
    body = {
        "slug": slug,
        "name": name or slug,
        "allowed_models": list(models) or None,
        "metadata": terminal.pairs(metadata),
    }
    made = client.call("POST", f"/tenants/{segment(tenant)}/projects", body, terminal.headers(idempotency_key))
    _show([made], as_json, single=True)
    terminal.warn_unserved(client, models)


@project.command("list")
@click.argument("tenant")
@talks
def list_projects(client: AdminClient, *, as_json: bool, tenant: str) -> None:
    """List the projects of TENANT, oldest first."""
    _show(list(client.pages(f"/tenants/{segment(tenant)}/projects")), as_json)


@project.command("show")
@click.argument("tenant")
@click.argument("slug")
@talks
def show_project(client: AdminClient, *, as_json: bool, tenant: str, slug: str) -> None:
    """Show the project SLUG of TENANT."""
    _show([client.call("GET", _path(tenant, slug))], as_json, single=True)


@project.command("change")
@click.argument("tenant")
@click.argument("slug")
@click.option("--name", default=None, help="Display name.")
@MODEL
@ANY_MODEL
@METADATA
@NO_METADATA
@talks
def change_project(
    client: AdminClient,
    *,
    as_json: bool,
    tenant: str,
    slug: str,
    name: str | None,
    models: Sequence[str],
    any_model: bool,
    metadata: Sequence[str],
    no_metadata: bool,
) -> None:
    """Change the project SLUG of TENANT; what is left out stays."""
    changes = terminal.given(name=name) | terminal.narrowing(models, any_model, metadata, no_metadata)
    terminal.require_changes(changes)
    _show([client.call("PATCH", _path(tenant, slug), changes)], as_json, single=True)
    terminal.warn_unserved(client, models)


@project.command("deactivate")
@click.argument("tenant")
@click.argument("slug")
@talks
def deactivate_project(client: AdminClient, *, as_json: bool, tenant: str, slug: str) -> None:
    """Refuse all keys of the project, within two seconds."""
    _show([client.call("PATCH", _path(tenant, slug), {"active": False})], as_json, single=True)


@project.command("activate")
@click.argument("tenant")
@click.argument("slug")
@talks
def activate_project(client: AdminClient, *, as_json: bool, tenant: str, slug: str) -> None:
    """Accept the keys of the project again."""
    _show([client.call("PATCH", _path(tenant, slug), {"active": True})], as_json, single=True)


def _path(tenant: str, slug: str) -> str:
    return f"/tenants/{segment(tenant)}/projects/{segment(slug)}"


def _show(rows: Sequence[dict[str, Any]], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "slug": lambda row: row["slug"],
        "tenant": lambda row: row["tenant"],
        "name": lambda row: row["name"],
        "state": terminal.state,
        "models": lambda row: "as the tenant" if row["allowed_models"] is None else terminal.models(row),
        "metadata": terminal.metadata,
        "created": terminal.created,
    }
    terminal.show(rows, columns, as_json, single=single, empty="no more projects")
