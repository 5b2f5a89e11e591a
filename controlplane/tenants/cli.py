"""`tidegate tenant|key`: tenants and keys from the terminal, through the admin API.

Layer: service. Prints tables, or JSON with --json; one sentence and exit code 1 (refused, unreachable) or 2 (wrong
input) on failure. A new key is printed once, alone on its line.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from controlplane.settings import default_home
from controlplane.tenants import keys
from controlplane.tenants.admin_client import AdminApiError, AdminClient, connect, segment
from controlplane.tenants.schemas import SLUG_PATTERN
from dataplane.protocol import ReplicaState

MODEL = click.option("--model", "models", multiple=True, help="Allow only this served model; repeat for more.")
IDEMPOTENCY = click.option("--idempotency-key", default=None, help="Makes a repeated creation harmless.")


def _talks(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` a client, --home and --json, and turn failures into a sentence and an exit code."""

    @click.option(
        "--home",
        type=click.Path(path_type=Path, file_okay=False),
        default=default_home,
        show_default="TIDEGATE_HOME or ./.tidegate",
        help="Folder of `tidegate up`; TIDEGATE_CONTROL_URL and TIDEGATE_ADMIN_TOKEN win.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @functools.wraps(command)
    def run(home: Path, as_json: bool, **arguments: Any) -> None:
        try:
            command(connect(home), as_json=as_json, **arguments)
        except AdminApiError as error:
            click.echo(f"tidegate: {error.message}", err=True)
            sys.exit(2 if error.usage else 1)

    return run


@click.group()
def tenant() -> None:
    """Create, list and change tenants."""


@tenant.command("create")
@click.argument("slug")
@click.option("--name", default=None, help="Display name; the slug when left out.")
@MODEL
@click.option("--priority", type=int, default=0, show_default=True, help="Lower goes first.")
@IDEMPOTENCY
@_talks
def create_tenant(
    client: AdminClient,
    *,
    as_json: bool,
    slug: str,
    name: str | None,
    models: Sequence[str],
    priority: int,
    idempotency_key: str | None,
) -> None:
    """Create the tenant SLUG: 1 to 40 lower-case letters, digits and hyphens."""
    if not re.fullmatch(SLUG_PATTERN, slug):
        raise AdminApiError(f"slug: {slug!r} must be 1 to 40 lower-case letters, digits and hyphens", usage=True)
    body = {"slug": slug, "name": name or slug, "priority": priority, "allowed_models": list(models) or None}
    _show_tenants([client.call("POST", "/tenants", body, _headers(idempotency_key))], as_json, single=True)
    _warn_unserved(client, models)


@tenant.command("list")
@_talks
def list_tenants(client: AdminClient, *, as_json: bool) -> None:
    """List all tenants, oldest first."""
    rows = list(client.pages("/tenants"))
    _show_tenants(rows, as_json)
    _warn_unserved(client, [model for row in rows for model in row["allowed_models"] or ()])


@tenant.command("show")
@click.argument("slug")
@_talks
def show_tenant(client: AdminClient, *, as_json: bool, slug: str) -> None:
    """Show the tenant SLUG."""
    shown = client.call("GET", f"/tenants/{segment(slug)}")
    _show_tenants([shown], as_json, single=True)
    _warn_unserved(client, shown["allowed_models"] or ())


@tenant.command("deactivate")
@click.argument("slug")
@_talks
def deactivate_tenant(client: AdminClient, *, as_json: bool, slug: str) -> None:
    """Refuse all keys of SLUG, within two seconds."""
    _show_tenants([client.call("PATCH", f"/tenants/{segment(slug)}", {"active": False})], as_json, single=True)


@tenant.command("activate")
@click.argument("slug")
@_talks
def activate_tenant(client: AdminClient, *, as_json: bool, slug: str) -> None:
    """Accept the keys of SLUG again."""
    _show_tenants([client.call("PATCH", f"/tenants/{segment(slug)}", {"active": True})], as_json, single=True)


@click.group()
def key() -> None:
    """Create, list and revoke API keys."""


@key.command("create")
@click.argument("slug")
@click.option("--name", default="cli", show_default=True, help="What the key is for.")
@MODEL
@click.option("--expires", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]), default=None, help="In UTC.")
@IDEMPOTENCY
@_talks
def create_key(
    client: AdminClient,
    *,
    as_json: bool,
    slug: str,
    name: str,
    models: Sequence[str],
    expires: datetime | None,
    idempotency_key: str | None,
) -> None:
    """Create a key of the tenant SLUG and print it, once."""
    body = {
        "name": name,
        "allowed_models": list(models) or None,
        "expires_at": expires.replace(tzinfo=UTC).isoformat() if expires else None,
    }
    created = client.call("POST", f"/tenants/{segment(slug)}/keys", body, _headers(idempotency_key))
    if as_json:
        _print_json(created)
    else:
        click.echo(created["key"])
        click.echo(f"Keep it: it is shown this once. Its id is {created['view']['key_id']}.", err=True)
    _warn_unserved(client, models)


@key.command("list")
@click.argument("slug")
@_talks
def list_keys(client: AdminClient, *, as_json: bool, slug: str) -> None:
    """List the keys of the tenant SLUG, oldest first."""
    rows = list(client.pages(f"/tenants/{segment(slug)}/keys"))
    _show_keys(rows, as_json)
    _warn_unserved(client, [model for row in rows for model in row["allowed_models"] or ()])


@key.command("revoke")
@click.argument("key_id")
@_talks
def revoke_key(client: AdminClient, *, as_json: bool, key_id: str) -> None:
    """Revoke KEY_ID (the whole key is understood too); it is refused everywhere within two seconds."""
    if key_id.startswith(f"{keys.PREFIX}_"):  # a whole key must not travel in a URL
        try:
            key_id = keys.parse(key_id).key_id
        except keys.MalformedKeyError as error:
            raise AdminApiError(str(error), usage=True) from None
    _show_keys([client.call("DELETE", f"/keys/{segment(key_id)}")], as_json, single=True)


def _headers(idempotency_key: str | None) -> dict[str, str]:
    return {"idempotency-key": idempotency_key} if idempotency_key else {}


def _warn_unserved(client: AdminClient, models: Sequence[str]) -> None:
    """Say which of `models` nobody can be served now: a slip, or a replica that is yet to come."""
    if not models:
        return
    with contextlib.suppress(AdminApiError):  # what was asked for is done and shown
        ready = {row["pool"] for row in client.call("GET", "/replicas") if row["state"] == ReplicaState.READY}
        served = {pool["model"] for pool in client.call("GET", "/pools") if pool["name"] in ready}
        if missing := sorted(set(models) - served):
            click.echo(f"served by no replica now: {', '.join(missing)}", err=True)


def _show_tenants(rows: list[dict[str, Any]], as_json: bool, *, single: bool = False) -> None:
    if as_json:
        _print_json(rows[0] if single else rows)
        return
    columns = ("slug", "name", "state", "models", "priority", "created")
    lines = [
        (
            row["slug"],
            row["name"],
            "active" if row["active"] else "inactive",
            _models(row["allowed_models"]),
            str(row["priority"]),
            _moment(row["created_at"]),
        )
        for row in rows
    ]
    _print_table(columns, lines, empty="no tenants yet: create one with `tidegate tenant create SLUG`")


def _show_keys(rows: list[dict[str, Any]], as_json: bool, *, single: bool = False) -> None:
    if as_json:
        _print_json(rows[0] if single else rows)
        return
    columns = ("id", "tenant", "name", "key", "state", "models", "created", "expires")
    lines = [
        (
            row["key_id"],
            row["tenant"],
            row["name"],
            row["hint"],
            _key_state(row),
            _models(row["allowed_models"]),
            _moment(row["created_at"]),
            _moment(row["expires_at"]) if row["expires_at"] else "never",
        )
        for row in rows
    ]
    _print_table(columns, lines, empty="no keys yet: create one with `tidegate key create SLUG`")


def _key_state(row: dict[str, Any]) -> str:
    if row["revoked_at"]:
        return f"revoked {_moment(row['revoked_at'])}"
    ended = row["expires_at"] and msgspec.convert(row["expires_at"], datetime) <= datetime.now(UTC)
    return "expired" if ended else "valid"


def _models(models: list[str] | None) -> str:
    return "all" if models is None else ", ".join(models) or "none"


def _moment(text: str) -> str:
    return msgspec.convert(text, datetime).astimezone(UTC).strftime("%Y-%m-%d %H:%MZ")


def _print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def _print_table(columns: Sequence[str], lines: Sequence[Sequence[str]], *, empty: str) -> None:
    if not lines:
        click.echo(empty, err=True)
        return
    table = Table(*columns, box=None, pad_edge=False)
    for line in lines:
        table.add_row(*map(escape, line))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
