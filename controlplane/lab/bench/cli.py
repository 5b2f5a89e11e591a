"""`tidegate bench`: the dataplane's benches, and those of the control plane.

Layer: service. Reads flags, says what is wrong in one sentence and exits. The dataplane's group is loaded by name, so
that nothing here imports what could load torch.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

DATAPLANE = "dataplane.bench.cli"
PARTS = ("latency", "throughput", "streams", "overload", "memory", "against")
EXIT_FAILED = 1


class BenchGroup(click.Group):
    """Its own commands first, then the dataplane's."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._engines().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or self._engines().get_command(ctx, cmd_name)

    def _engines(self) -> click.Group:
        group: click.Group = importlib.import_module(DATAPLANE).bench
        return group


@click.group(cls=BenchGroup, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure the engine, its policies and the gateway, each beside a control that must show no gain."""


EXIT_CODES = """
\b
Exit codes:
    0  measured
    1  a process ended, or did not answer as it must, while it was measured
    2  a flag is wrong
    9  a process did not become ready
   10  something that must be installed is not
  130  interrupted; everything that was started has been stopped
"""


@bench.command(epilog=EXIT_CODES)
@click.option(
    "--only", multiple=True, type=click.Choice(PARTS), help="Run this part; may be given several times.  [default: all]"
)
@click.option("--seed", default=0, show_default=True, type=int, help="Of the arrivals.")
@click.option("--quick", is_flag=True, help="Short runs: the directions stay, the figures are rough.")
@click.option("--install", is_flag=True, help="As root, install wrk with apt-get where it is missing.")
@click.option(
    "--against",
    type=click.Choice(["litellm"]),
    help="Also compare with LiteLLM's proxy and what else installs from PyPI and npm; takes minutes.",
)
@click.option(
    "--environments",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that keeps what --against installs, for the next run.  [default: thrown away]",
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to a file too."
)
def gateway(
    *,
    only: tuple[str, ...],
    seed: int,
    quick: bool,
    install: bool,
    against: str | None,
    environments: Path | None,
    json_path: Path | None,
) -> None:
    """Measure what the gateway adds to every request and token, and how much one process bears.

    The whole deployment of `tidegate up` runs in a temporary folder with a fake engine as its replica; the gateway has
    one CPU core, the load and the fake engine another. Needs wrk.
    """
    from rich.console import Console

    from controlplane.lab.bench import gateway as gateway_bench
    from controlplane.lab.bench.case import GatewayCase
    from controlplane.lab.bench.closed import LoadError
    from controlplane.lab.bench.report import emit
    from controlplane.local.errors import ExitCode, LocalError

    if "against" in only and against is None:
        raise click.UsageError("--only against needs --against litellm")
    progress = Console(stderr=True, highlight=False)

    def tell(what: str) -> None:
        progress.print(f"{what} …", style="dim")

    try:
        report = gateway_bench.run(
            GatewayCase(seed=seed, quick=quick),
            only=only,
            install=install,
            against=against is not None,
            environments=environments,
            console=progress,
            tell=tell,
        )
    except LocalError as error:
        click.echo(f"Error: {error.message}", err=True)
        sys.exit(error.code)
    except LoadError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    emit(report, json_path)


@bench.command(epilog=EXIT_CODES)
@click.option("--seed", default=0, show_default=True, type=int, help="Kept with the results; the load is not random.")
@click.option("--quick", is_flag=True, help="Short runs: the directions stay, the figures are rough.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to a file too."
)
def fairness(*, seed: int, quick: bool, json_path: Path | None) -> None:
    """Measure who gets how much of a busy pool through four gateways, and what that costs.

    Two tenants of weights 1 and 3 flood a pool of replicas with a made-up service time, beside a polite third; then
    prompts of the greatest length flood it beside short ones. Each figure has its control in the same run.
    """
    from rich.console import Console

    from controlplane.lab.bench import fairness as fairness_bench
    from controlplane.lab.bench.report import emit
    from controlplane.local.errors import ExitCode, LocalError

    progress = Console(stderr=True, highlight=False)

    def tell(what: str) -> None:
        progress.print(f"{what} …", style="dim")

    try:
        report = fairness_bench.run(fairness_bench.FairnessCase(seed=seed, quick=quick), console=progress, tell=tell)
    except LocalError as error:
        click.echo(f"Error: {error.message}", err=True)
        sys.exit(error.code)
    except ValueError as error:
        click.echo(f"Error: the gateways did not answer as they must: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    emit(report, json_path)


@bench.command("retry-after")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the requests.")
@click.option("--quick", is_flag=True, help="Fewer requests.")
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    help="Folder of public traces (azure2023, vtc), or one file.  [default: ../shared/traces where it is]",
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to a file too."
)
def retry_after(*, seed: int, quick: bool, traces: Path | None, json_path: Path | None) -> None:
    """Replay refusals: of those who wait exactly Retry-After, how many pass?"""
    from controlplane.lab.bench.report import emit
    from controlplane.lab.retry.bench import run
    from controlplane.local.errors import LocalError

    def tell(what: str) -> None:
        click.echo(f"{what} …", err=True)

    try:
        report = run(seed=seed, quick=quick, traces=traces or default_traces(), tell=tell)
    except LocalError as error:
        click.echo(f"Error: {error.message}", err=True)
        sys.exit(error.code)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--traces") from None
    for name, reason in report.results["skipped"].items():
        click.echo(f"skipped the trace {name}: {reason}", err=True)
    emit(report, json_path)


def default_traces() -> Path | None:
    """The folder beside the checkout that holds public traces, if there is one."""
    folder = Path(__file__).parents[4] / "shared" / "traces"
    return folder if folder.is_dir() else None
