"""`tidegate chaos`. Layer: service. Reads flags, prints one table, exits with 1 when something did not hold."""

from __future__ import annotations

import sys
from pathlib import Path

import click

NAMES = (
    "redis-restart",
    "redis-empty",
    "postgres-frozen",
    "postgres-shutdown",
    "gateway-kill",
    "replica-kill",
    "worker-kill",
    "clock-step",
)
"""Those of `faults.FAULTS`, known without loading them."""
EXIT_NOT_HELD = 1
EXIT_CODES = """
\b
Exit codes:
    0  everything held; a fault that cannot be injected here is skipped and says so
    1  something did not hold
    2  a flag is wrong
    9  a process did not become ready
   10  something that must be installed is not
  130  interrupted; everything that was started has been stopped
"""


@click.command(epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--only", multiple=True, type=click.Choice(NAMES), help="Inject this; may be given several times.  [default: all]"
)
@click.option("--quick", is_flag=True, help="Outages of seconds instead of up to a minute, and half the load.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the requests.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to a file too."
)
def chaos(*, only: tuple[str, ...], quick: bool, seed: int, json_path: Path | None) -> None:
    """Break a running deployment in turn, under load, and check what must hold after each fault.

    Everything `tidegate up` runs, with a second gateway and two fake engines, in a temporary folder on free ports.
    """
    from rich.console import Console

    from controlplane.lab.bench.report import emit
    from controlplane.lab.chaos import runner
    from controlplane.local.errors import ExitCode, LocalError

    progress = Console(stderr=True, highlight=False)

    def tell(what: str) -> None:
        progress.print(f"{what} …", style="dim")

    try:
        report = runner.run(only=only, quick=quick, seed=seed, console=progress, tell=tell)
    except LocalError as error:
        click.echo(f"Error: {error.message}", err=True)
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    emit(report, json_path)
    if runner.failed(report):
        sys.exit(EXIT_NOT_HELD)
