"""`tidegate key`: API keys from the terminal, through the admin API.

Layer: service. A new key is printed once, alone on its line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from controlplane.tenants import keys, terminal
from controlplane.tenants.admin_client import AdminApiError, AdminClient, segment
from controlplane.tenants.principal_cli import principal_id
from controlplane.tenants.schemas import DEFAULT_PROJECT, Scope
from controlplane.tenants.terminal import IDEMPOTENCY, METADATA, MODEL, talks

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@click.group()
def key() -> None:
    """Create, list, rotate and revoke API keys."""


@key.command("create")
@click.argument("slug")
@click.option("--name", default="cli", show_default=True, help="What the key is for.")
@click.option("--project", default=DEFAULT_PROJECT, show_default=True, help="The project it belongs to.")
@click.option("--principal", default=None, help="Who owns it: a name or an id.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice([scope.value for scope in Scope]),
    help="What it may be used for; repeat for more. Left out: inference and quota:read.",
)
@MODEL
@click.option("--expires", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]), default=None, help="In UTC.")
@METADATA
@IDEMPOTENCY
@talks
def create_key(
    client: AdminClient,
    *,
    as_json: bool,
    slug: str,
    name: str,
    project: str,
    principal: str | None,
    scopes: Sequence[str],
    models: Sequence[str],
    expires: datetime | None,
    metadata: Sequence[str],
    idempotency_key: str | None,
) -> None:
    """Create a key of the tenant SLUG and print it, once."""
    body = {
        "name": name,
        "project": project,
        "principal_id": principal_id(client, slug, principal) if principal else None,
        "scopes": list(scopes) or None,
        "allowed_models": list(models) or None,
        "expires_at": expires.replace(tzinfo=UTC).isoformat() if expires else None,
        "metadata": terminal.pairs(metadata),
    }
    created = client.call("POST", f"/tenants/{segment(slug)}/keys", body, terminal.headers(idempotency_key))
    _print_once(created, as_json)
    terminal.warn_unserved(client, models)


@key.command("list")
@click.argument("slug")
@talks
def list_keys(client: AdminClient, *, as_json: bool, slug: str) -> None:
    """List the keys of the tenant SLUG, oldest first."""
    rows = list(client.pages(f"/tenants/{segment(slug)}/keys"))
    _show(rows, as_json)
    terminal.warn_unserved(client, [model for row in rows for model in row["allowed_models"] or ()])


@key.command("rotate")
@click.argument("key_id")
@click.option(
    "--grace", default="1d", show_default=True, help="How long the old one stays valid: 0, 90s, 30m, 12h, 7d."
)
@IDEMPOTENCY
@talks
def rotate_key(client: AdminClient, *, as_json: bool, key_id: str, grace: str, idempotency_key: str | None) -> None:
    """Replace KEY_ID (the whole key is understood too) by a new key of the same identity and print that, once."""
    path = f"/keys/{segment(_id_of(key_id))}/rotate"
    created = client.call("POST", path, {"grace_s": _seconds(grace)}, terminal.headers(idempotency_key))
    _print_once(created, as_json)


@key.command("revoke")
@click.argument("key_id")
@talks
def revoke_key(client: AdminClient, *, as_json: bool, key_id: str) -> None:
    """Revoke KEY_ID (the whole key is understood too); it is refused everywhere within two seconds."""
    _show([client.call("DELETE", f"/keys/{segment(_id_of(key_id))}")], as_json, single=True)


def _id_of(key_id: str) -> str:
    """The id in a whole key, which must not travel in a URL; an id as it is. Raises AdminApiError."""
    if not key_id.startswith(f"{keys.PREFIX}_"):
        return key_id
    try:
        return keys.parse(key_id).key_id
    except keys.MalformedKeyError as error:
        raise AdminApiError(str(error), usage=True) from None


def _seconds(text: str) -> int:
    """Seconds of "0", "90s", "30m", "12h" or "7d". Raises AdminApiError."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text)
    if match is None:
        raise AdminApiError(f"--grace: {text!r} is not a time such as 90s, 30m, 12h or 7d", usage=True)
    return int(match.group(1)) * UNITS_S[match.group(2) or "s"]


def _print_once(created: dict[str, Any], as_json: bool) -> None:
    if as_json:
        terminal.print_json(created)
    else:
        click.echo(created["key"])
        click.echo(f"Keep it: it is shown this once. Its id is {created['view']['key_id']}.", err=True)


def _show(rows: Sequence[dict[str, Any]], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "id": lambda row: row["key_id"],
        "tenant": lambda row: row["tenant"],
        "project": lambda row: row["project"],
        "owner": lambda row: row["principal"] or "",
        "name": lambda row: row["name"],
        "key": lambda row: row["hint"],
        "state": _state,
        "scopes": lambda row: ", ".join(row["scopes"]) or "none",
        "models": lambda row: "as the project" if row["allowed_models"] is None else terminal.models(row),
        "created": terminal.created,
        "expires": lambda row: terminal.moment(row["expires_at"]) if row["expires_at"] else "never",
    }
    terminal.show(
        rows, columns, as_json, single=single, empty="no keys yet: create one with `tidegate key create SLUG`"
    )


def _state(row: terminal.Row) -> str:
    if row["revoked_at"]:
        return f"revoked {terminal.moment(row['revoked_at'])}"
    if row["expires_at"] and msgspec.convert(row["expires_at"], datetime) <= datetime.now(UTC):
        return "expired"
    return f"rotated to {row['rotated_to']}" if row["rotated_to"] else "valid"
