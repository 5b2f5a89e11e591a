"""`tidegate backup` and `tidegate restore`: flags in, exit code out. Layer: service."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from controlplane.local.archive import Manifest
from controlplane.local.cli import EXIT_CODES
from controlplane.local.errors import LocalError
from controlplane.settings import default_home

_HOME = click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Data folder. Default: TIDEGATE_HOME or ./.tidegate.",
)
_FILE = click.argument("path", type=click.Path(path_type=Path, dir_okay=False))


@click.command(epilog=EXIT_CODES)
@_FILE
@_HOME
@click.option("--without-secrets", is_flag=True, help="Leave out the tokens and credentials of the data folder.")
def backup(path: Path, home: Path | None, without_secrets: bool) -> None:
    """Back up the data folder and its database to the new file PATH, while it runs or not.

    The file holds keys' hashes, and with the secrets all that is needed to be this installation: keep it private.
    """
    from controlplane.local.backup import back_up

    made = _say(lambda: back_up(home or default_home(), path, secrets=not without_secrets))
    size = sum(part.size for part in made.parts.values())
    click.echo(f"{path}: {size / 2**20:.1f} MiB, database at {made.revision}, checked by its checksums")


@click.command(epilog=EXIT_CODES)
@_FILE
@_HOME
def restore(path: Path, home: Path | None) -> None:
    """Restore the backup PATH into a data folder that does not exist yet or is empty; then `tidegate up`."""
    from controlplane.local import backup as service

    made = _say(lambda: service.restore(path, home or default_home()))
    secrets = "" if made.secrets else "; it holds no secrets, so `tidegate up` makes new ones"
    click.echo(f"restored into {home or default_home()}, database at {made.revision}{secrets}")


def _say(work: Callable[[], Manifest]) -> Manifest:
    try:
        return work()
    except LocalError as error:
        click.echo(f"tidegate: {error.message}", err=True)
        sys.exit(error.code)
