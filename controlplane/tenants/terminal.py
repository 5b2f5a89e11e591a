"""What the commands on tenants, projects, principals and keys share: their client, their options, how they print.

Layer: service. Prints tables, or JSON with --json; one sentence and exit code 1 (refused, unreachable, output that
cannot be written) or 2 (wrong input) on failure. A pipe that its reader closed ends a command quietly, with 141 as a
shell tells of SIGPIPE.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from controlplane.settings import default_home
from controlplane.tenants.admin_client import AdminApiError, AdminClient, connect
from controlplane.tenants.schemas import SLUG_PATTERN
from dataplane.protocol import ReplicaState

Row = Mapping[str, Any]

MODEL = click.option("--model", "models", multiple=True, help="Allow only this served model; repeat for more.")
METADATA = click.option(
    "--metadata", "metadata", multiple=True, metavar="KEY=VALUE", help="A pair to keep with it; repeat for more."
)
IDEMPOTENCY = click.option("--idempotency-key", default=None, help="Makes a repeated creation harmless.")
ANY_MODEL = click.option("--any-model", is_flag=True, help="Allow every model again.")
NO_METADATA = click.option("--no-metadata", is_flag=True, help="Drop all pairs.")


def talks(command: Callable[..., None]) -> Callable[..., None]:
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
        except BrokenPipeError:  # who reads has had enough, as `head` has
            _write_no_more()
            sys.exit(128 + signal.SIGPIPE)
        except OSError as error:
            _write_no_more()
            click.echo(f"tidegate: {error.filename or 'standard output'}: {error.strerror}", err=True)
            sys.exit(1)

    return run


def _write_no_more() -> None:
    """Nothing of what standard output has not taken is tried again at the end."""
    with contextlib.suppress(OSError):  # it may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_slug(slug: str) -> None:
    """Refuse a new slug that cannot be one, before anything is sent. Raises AdminApiError."""
    if not re.fullmatch(SLUG_PATTERN, slug):
        raise AdminApiError(f"slug: {slug!r} must be 1 to 40 lower-case letters, digits and hyphens", usage=True)


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """The pairs of repeated KEY=VALUE options. Raises AdminApiError."""
    found: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise AdminApiError(f"--metadata: {text!r} is not KEY=VALUE", usage=True)
        found[key] = value
    return found


def given(**fields: Any) -> dict[str, Any]:
    """Those fields of a change that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def narrowing(models: Sequence[str], any_model: bool, metadata: Sequence[str], no_metadata: bool) -> dict[str, Any]:
    """What --model, --any-model, --metadata and --no-metadata say of a change. Raises AdminApiError."""
    if models and any_model:
        raise AdminApiError("give --model or --any-model, not both", usage=True)
    if metadata and no_metadata:
        raise AdminApiError("give --metadata or --no-metadata, not both", usage=True)
    changes: dict[str, Any] = {}
    if models or any_model:
        changes["allowed_models"] = list(models) or None
    if metadata or no_metadata:
        changes["metadata"] = pairs(metadata)
    return changes


def require_changes(changes: Mapping[str, Any]) -> None:
    """Raises AdminApiError when a change says nothing."""
    if not changes:
        raise AdminApiError("nothing to change: name at least one option", usage=True)


def headers(idempotency_key: str | None) -> dict[str, str]:
    """The headers of a creation."""
    return {"idempotency-key": idempotency_key} if idempotency_key else {}


def warn_unserved(client: AdminClient, models: Sequence[str]) -> None:
    """Say which of `models` nobody can be served now: a slip, or a replica that is yet to come."""
    if not models:
        return
    with contextlib.suppress(AdminApiError):  # what was asked for is done and shown
        ready = {row["pool"] for row in client.call("GET", "/replicas") if row["state"] == ReplicaState.READY}
        served = {pool["model"] for pool in client.call("GET", "/pools") if pool["name"] in ready}
        if missing := sorted(set(models) - served):
            click.echo(f"served by no replica now: {', '.join(missing)}", err=True)


def warn_unknown_pool(client: AdminClient, pool: str | None) -> None:
    """Say that there is no `pool`: a slip, or one that is yet to come."""
    if not pool:
        return
    with contextlib.suppress(AdminApiError):  # what was asked for is done and shown
        names = sorted(one["name"] for one in client.call("GET", "/pools"))
        if pool not in names:
            click.echo(f"there is no pool {pool} yet; there are: {', '.join(names) or 'none'}", err=True)


def show(
    rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]], as_json: bool, *, single: bool = False, empty: str
) -> None:
    """Print `rows` as JSON, or as a table of `columns`: each heading with what it shows of a row."""
    if as_json:
        print_json(rows[0] if single else rows)
        return
    print_table(tuple(columns), [[cell(row) for cell in columns.values()] for row in rows], empty=empty)


def print_table(columns: Sequence[str], lines: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print `lines` under `columns`, or `empty` when there are none."""
    if not lines:
        click.echo(empty, err=True)
        return
    table = Table(*columns, box=None, pad_edge=False)
    for line in lines:
        table.add_row(*map(escape, line))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def state(row: Row) -> str:
    return "active" if row["active"] else "inactive"


def models(row: Row) -> str:
    allowed = row["allowed_models"]
    return "all" if allowed is None else ", ".join(allowed) or "none"


def metadata(row: Row) -> str:
    return ", ".join(f"{key}={value}" for key, value in row["metadata"].items())


def created(row: Row) -> str:
    return moment(row["created_at"])


def moment(text: str) -> str:
    """A timestamp of the API, to the minute."""
    return msgspec.convert(text, datetime).astimezone(UTC).strftime("%Y-%m-%d %H:%MZ")
