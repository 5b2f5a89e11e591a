"""`tidegate principal`: people and service accounts from the terminal, through the admin API. Layer: service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import click

from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminApiError, AdminClient, segment
from controlplane.tenants.schemas import PrincipalKind, PrincipalRole
from controlplane.tenants.terminal import IDEMPOTENCY, talks

ROLES = click.Choice([role.value for role in PrincipalRole])


@click.group()
def principal() -> None:
    """Create, list and change a tenant's people and service accounts, who own keys."""


@principal.command("create")
@click.argument("tenant")
@click.argument("name")
@click.option("--role", type=ROLES, default=PrincipalRole.MEMBER.value, show_default=True, help="Bounds its keys.")
@click.option("--email", default=None, help="Makes it a person; without one it is a service account.")
@IDEMPOTENCY
@talks
def create_principal(
    client: AdminClient,
    *,
    as_json: bool,
    tenant: str,
    name: str,
    role: str,
    email: str | None,
    idempotency_key: str | None,
) -> None:
    """Create the principal NAME of TENANT."""
    kind = PrincipalKind.SERVICE_ACCOUNT if email is None else PrincipalKind.PERSON
    body = {"kind": kind.value, "name": name, "role": role, "email": email}
    made = client.call("POST", f"/tenants/{segment(tenant)}/principals", body, terminal.headers(idempotency_key))
    _show([made], as_json, single=True)


@principal.command("list")
@click.argument("tenant")
@talks
def list_principals(client: AdminClient, *, as_json: bool, tenant: str) -> None:
    """List the principals of TENANT, oldest first."""
    _show(list(client.pages(f"/tenants/{segment(tenant)}/principals")), as_json)


@principal.command("show")
@click.argument("tenant")
@click.argument("name")
@talks
def show_principal(client: AdminClient, *, as_json: bool, tenant: str, name: str) -> None:
    """Show the principal NAME (its id is understood too)."""
    path = f"/tenants/{segment(tenant)}/principals/{principal_id(client, tenant, name)}"
    _show([client.call("GET", path)], as_json, single=True)


@principal.command("change")
@click.argument("tenant")
@click.argument("name")
@click.option("--role", type=ROLES, required=True, help="Bounds the scopes of its keys, older ones too.")
@talks
def change_principal(client: AdminClient, *, as_json: bool, tenant: str, name: str, role: str) -> None:
    """Change the role of NAME, within two seconds."""
    _change(client, tenant, name, {"role": role}, as_json)


@principal.command("deactivate")
@click.argument("tenant")
@click.argument("name")
@talks
def deactivate_principal(client: AdminClient, *, as_json: bool, tenant: str, name: str) -> None:
    """Refuse all keys of NAME, within two seconds."""
    _change(client, tenant, name, {"active": False}, as_json)


@principal.command("activate")
@click.argument("tenant")
@click.argument("name")
@talks
def activate_principal(client: AdminClient, *, as_json: bool, tenant: str, name: str) -> None:
    """Accept the keys of NAME again."""
    _change(client, tenant, name, {"active": True}, as_json)


def principal_id(client: AdminClient, tenant: str, name: str) -> str:
    """The id of the principal that `name`, a name or an id, means. Raises AdminApiError."""
    try:
        return str(UUID(name))
    except ValueError:
        pass
    found = client.call("GET", f"/tenants/{segment(tenant)}/principals?{urlencode({'name': name})}")["items"]
    if not found:
        raise AdminApiError(f"the tenant {tenant} has no principal named {name}")
    return str(found[0]["id"])


def _change(client: AdminClient, tenant: str, name: str, changes: dict[str, Any], as_json: bool) -> None:
    path = f"/tenants/{segment(tenant)}/principals/{principal_id(client, tenant, name)}"
    _show([client.call("PATCH", path, changes)], as_json, single=True)


def _show(rows: Sequence[dict[str, Any]], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "id": lambda row: row["id"],
        "tenant": lambda row: row["tenant"],
        "name": lambda row: row["name"],
        "kind": lambda row: row["kind"].replace("_", " "),
        "email": lambda row: row["email"] or "",
        "role": lambda row: row["role"],
        "state": terminal.state,
        "created": terminal.created,
    }
    terminal.show(
        rows,
        columns,
        as_json,
        single=single,
        empty="no principals yet: create one with `tidegate principal create TENANT NAME`",
    )
