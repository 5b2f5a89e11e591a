"""`tidegate prompts`: the opt-in request log from the terminal, through the admin API. Layer: service."""

from __future__ import annotations

from typing import Any

import click

from controlplane.tenants import terminal
from controlplane.tenants.admin_client import AdminClient, segment
from controlplane.tenants.schemas import Redaction
from controlplane.tenants.terminal import talks


@click.group()
def prompts() -> None:
    """Keep a tenant's prompts and answers, redacted, or stop; read them."""


@prompts.command("show")
@click.argument("tenant")
@talks
def show(client: AdminClient, *, as_json: bool, tenant: str) -> None:
    """Show whether TENANT's prompts are kept, and how."""
    _show(client.call("GET", _path(tenant)), as_json)


@prompts.command("on")
@click.argument("tenant")
@click.option("--days", "retention_days", type=click.IntRange(1, 30), default=7, show_default=True)
@click.option(
    "--sample", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Share kept."
)
@click.option(
    "--redact",
    type=click.Choice([*map(str, Redaction)]),
    multiple=True,
    default=[*map(str, Redaction)],
    show_default=True,
    help="What is taken out; repeat for more.",
)
@click.option("--template", "templates", multiple=True, help="More to take out: # a digit, @ a letter, ? either.")
@talks
def on(client: AdminClient, *, as_json: bool, tenant: str, **wanted: Any) -> None:
    """Keep TENANT's prompts and answers from now on."""
    _show(client.call("PUT", _path(tenant), {name: _plain(value) for name, value in wanted.items()}), as_json)


@prompts.command("off")
@click.argument("tenant")
@talks
def off(client: AdminClient, *, as_json: bool, tenant: str) -> None:
    """Keep nothing of TENANT any more, and delete what was kept."""
    _show(client.call("DELETE", _path(tenant)), as_json)


@prompts.command("list")
@click.argument("tenant")
@talks
def entries(client: AdminClient, *, as_json: bool, tenant: str) -> None:
    """List TENANT's logged requests without their texts, newest first."""
    columns = {
        "id": lambda row: str(row["id"]),
        "at": lambda row: terminal.moment(row["at"]),
        "request": lambda row: row["request_id"],
        "key": lambda row: row["key_id"],
        "model": lambda row: row["model"],
        "outcome": lambda row: f"{row['outcome']} {row['reason']}".strip(),
        "prompt": lambda row: f"{row['prompt_characters']} characters",
        "answer": lambda row: f"{row['answer_characters']} characters",
    }
    rows = list(client.pages(f"{_path(tenant)}/entries"))
    terminal.show(rows, columns, as_json, empty="no logged requests")


@prompts.command("read")
@click.argument("tenant")
@click.argument("entry_id", type=click.IntRange(min=1))
@talks
def read(client: AdminClient, *, as_json: bool, tenant: str, entry_id: int) -> None:
    """Read one of TENANT's logged requests. That you did is kept."""
    found = client.call("POST", f"{_path(tenant)}/entries/{entry_id}/read")
    if as_json:
        terminal.print_json(found)
        return
    click.echo(f"{found['prompt']}\n---\n{found['answer']}")


@prompts.command("reads")
@click.argument("tenant")
@talks
def reads(client: AdminClient, *, as_json: bool, tenant: str) -> None:
    """List who read TENANT's requests, newest first."""
    columns = {
        "at": lambda row: terminal.moment(row["at"]),
        "reader": lambda row: row["reader"],
        "id": lambda row: str(row["entry_id"]),
        "request": lambda row: row["request_id"],
    }
    terminal.show(list(client.pages(f"{_path(tenant)}/reads")), columns, as_json, empty="nobody has read any")


def _path(tenant: str) -> str:
    return f"/tenants/{segment(tenant)}/prompt-log"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _show(row: Any, as_json: bool) -> None:
    columns = {
        "tenant": lambda row: row["tenant"],
        "kept": lambda row: "yes" if row["log_prompts"] else "no",
        "days": lambda row: str(row["retention_days"]),
        "sample": lambda row: f"{row['sample'] * 100:g} %",
        "taken out": lambda row: ", ".join([*row["redact"], *row["templates"]]) or "nothing",
    }
    terminal.show([row], columns, as_json, single=True, empty="")
