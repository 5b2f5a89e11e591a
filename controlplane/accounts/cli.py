"""`tidegate user` and `tidegate token`: who may operate the control plane, from the terminal, through the admin API.

Layer: service. A password is never an argument: it is asked for without echo, or read from standard input.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import click

from controlplane.accounts.schemas import Role
from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminApiError, AdminClient, segment
from controlplane.tenants.terminal import talks

ROLES = click.Choice([role.value for role in Role])
TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"])


@click.group()
def user() -> None:
    """Create, list and change who may log in to the console."""


@user.command("create")
@click.argument("email")
@click.option("--role", type=ROLES, default=Role.VIEWER.value, show_default=True)
@talks
def create_user(client: AdminClient, *, as_json: bool, email: str, role: str) -> None:
    """Create the user EMAIL; the password is asked for, or read from standard input."""
    body = {"email": email, "role": role, "password": _password()}
    _show_users([client.call("POST", "/users", body)], as_json, single=True)


@user.command("list")
@talks
def list_users(client: AdminClient, *, as_json: bool) -> None:
    """List users."""
    _show_users(list(client.pages("/users")), as_json)


@user.command("change")
@click.argument("email")
@click.option("--role", type=ROLES, default=None)
@click.option("--password", "new_password", is_flag=True, help="Ask for a new one, or read it from standard input.")
@talks
def change_user(client: AdminClient, *, as_json: bool, email: str, role: str | None, new_password: bool) -> None:
    """Change the user EMAIL, whose sessions end."""
    changes = terminal.given(role=role)
    if new_password:
        changes["password"] = _password()
    terminal.require_changes(changes)
    _change(client, email, changes, as_json)


@user.command("deactivate")
@click.argument("email")
@talks
def deactivate_user(client: AdminClient, *, as_json: bool, email: str) -> None:
    """Let EMAIL log in no more, and end its sessions."""
    _change(client, email, {"active": False}, as_json)


@user.command("activate")
@click.argument("email")
@talks
def activate_user(client: AdminClient, *, as_json: bool, email: str) -> None:
    """Let EMAIL log in again."""
    _change(client, email, {"active": True}, as_json)


@click.group()
def token() -> None:
    """Create, list and revoke tokens of the admin API."""


@token.command("create")
@click.argument("name")
@click.option("--role", type=ROLES, default=Role.VIEWER.value, show_default=True)
@click.option("--expires", type=TIME, default=None, help="In UTC; never when left out.")
@talks
def create_token(client: AdminClient, *, as_json: bool, name: str, role: str, expires: datetime | None) -> None:
    """Create the admin token NAME; its text is printed this once."""
    until = expires.replace(tzinfo=UTC).isoformat() if expires else None
    made = client.call("POST", "/api-tokens", {"name": name, "role": role, "expires_at": until})
    if as_json:
        terminal.print_json(made)
        return
    click.echo(made["token"])
    click.echo("keep it: it is not shown again", err=True)


@token.command("list")
@talks
def list_tokens(client: AdminClient, *, as_json: bool) -> None:
    """List admin tokens."""
    _show_tokens(list(client.pages("/api-tokens")), as_json)


@token.command("revoke")
@click.argument("token_id")
@talks
def revoke_token(client: AdminClient, *, as_json: bool, token_id: str) -> None:
    """Revoke the admin token with this id."""
    _show_tokens([client.call("DELETE", f"/api-tokens/{segment(token_id)}")], as_json, single=True)


def _password() -> str:
    if sys.stdin.isatty():
        asked: str = click.prompt("Password", hide_input=True, confirmation_prompt=True)
        return asked
    password = sys.stdin.readline(4096).rstrip("\r\n")
    if not password:
        raise AdminApiError("no password on standard input", usage=True)
    return password


def _change(client: AdminClient, email: str, changes: dict[str, Any], as_json: bool) -> None:
    found = [row["id"] for row in client.pages("/users") if row["email"] == email.strip().lower()]
    if not found:
        raise AdminApiError(f"there is no user {email}")
    _show_users([client.call("PATCH", f"/users/{segment(found[0])}", changes)], as_json, single=True)


def _show_users(rows: list[Any], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "email": lambda row: row["email"],
        "role": lambda row: row["role"],
        "state": terminal.state,
        "created": terminal.created,
        "last login": lambda row: _moment(row["last_login_at"]),
    }
    terminal.show(rows, columns, as_json, single=single, empty="no users yet")


def _show_tokens(rows: list[Any], as_json: bool, *, single: bool = False) -> None:
    columns = {
        "id": lambda row: row["id"],
        "name": lambda row: row["name"],
        "role": lambda row: row["role"],
        "created": terminal.created,
        "expires": lambda row: _moment(row["expires_at"]),
        "revoked": lambda row: _moment(row["revoked_at"]),
    }
    terminal.show(rows, columns, as_json, single=single, empty="no tokens yet")


def _moment(text: str | None) -> str:
    return terminal.moment(text) if text else "-"
