"""`tidegate up` and `tidegate doctor`: flags in, exit code out.

Layer: service. Every expected failure is one sentence on standard error; a traceback here is a defect.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console

from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.ports import LOOPBACK
from controlplane.settings import default_home

EXIT_CODES = """
\b
Exit codes:
    0  stopped on request, or every check held
    1  a check did not hold, or doctor found something wrong
    2  a flag or an environment variable is wrong
    3  a port is in use
    4  the disk is full
    5  no permission to write or read a file
    6  DATABASE_URL or REDIS_URL does not answer or cannot be used
    7  the data folder was made by another PostgreSQL major version
    8  another `tidegate up` owns this home folder
    9  a process did not become ready
   10  something that must be installed is not
   11  a file in the data folder is damaged
  130  killed by a Ctrl-C while it stopped, or a check cut short by one
"""


@click.command(epilog=EXIT_CODES)
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Data folder. Default: TIDEGATE_HOME or ./.tidegate.",
)
@click.option("--host", default=LOOPBACK, show_default=True, help="IP address the gateway and the console listen on.")
@click.option("--port-control", type=click.IntRange(1, 65535), help="Console and admin API.  [default: 7300]")
@click.option("--port-gateway", type=click.IntRange(1, 65535), help="Tenants' API.  [default: 7301]")
@click.option("--port-replica", type=click.IntRange(1, 65535), help="The engine's front.  [default: 7310]")
@click.option("--port-postgres", type=click.IntRange(1, 65535), help="Embedded PostgreSQL.  [default: 7332]")
@click.option("--port-valkey", type=click.IntRange(1, 65535), help="Embedded Valkey.  [default: 7379]")
@click.option("--free-ports", is_flag=True, help="Take free ports for those not given.")
@click.option(
    "--model", default="smollm2", show_default=True, help="Built-in name, a GGUF file or a folder with safetensors."
)
@click.option("--no-replica", is_flag=True, help="Start no engine; replicas may be started elsewhere.")
@click.option(
    "--check", is_flag=True, help="Start on free ports in a temporary folder, try everything once, print, stop."
)
def up(
    *,
    home: Path | None,
    host: str,
    port_control: int | None,
    port_gateway: int | None,
    port_replica: int | None,
    port_postgres: int | None,
    port_valkey: int | None,
    free_ports: bool,
    model: str,
    no_replica: bool,
    check: bool,
) -> None:
    """Start everything on this machine and supervise it until Ctrl-C.

    PostgreSQL and Valkey run embedded under the data folder unless DATABASE_URL and REDIS_URL name others.
    """
    from controlplane.local.check import run_check
    from controlplane.local.display import Display, show_next_steps
    from controlplane.local.interrupts import Interrupts
    from controlplane.local.stack import Options, Ports, Stack

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    interrupts = Interrupts()
    if check:
        if home is not None:
            raise click.UsageError("--check always uses a temporary folder; leave --home out")
        sys.exit(run_check(model=model, console=console, error_console=errors, interrupts=interrupts))
    named = {
        "control": port_control,
        "gateway": port_gateway,
        "replica": port_replica,
        "postgres": port_postgres,
        "valkey": port_valkey,
    }
    others = Ports.free() if free_ports else Ports()
    chosen = msgspec.structs.replace(others, **{name: port for name, port in named.items() if port is not None})
    display = Display(console, errors)
    stack = Stack(
        Options(
            home=home or default_home(),
            host=host,
            ports=chosen,
            model=model,
            replica=not no_replica,
        ),
        display,
    )
    code, orderly = ExitCode.OK, True
    try:
        with interrupts.raised():
            with display:
                running = stack.start()
            show_next_steps(console, running, stack.home, sys.executable)
            stack.run()
    except LocalError as error:
        display.fail(error.message)
        code = error.code
    except KeyboardInterrupt:
        code = ExitCode.OK
    finally:
        display.rest()
        orderly = stack.stop(interrupts.raised)
    sys.exit(code if orderly else ExitCode.INTERRUPTED)


@click.command(epilog=EXIT_CODES)
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Data folder. Default: TIDEGATE_HOME or ./.tidegate.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(home: Path | None, as_json: bool) -> None:
    """Print what was found on this machine and what is wrong, with a remedy."""
    from controlplane.local.doctor import examine, show

    findings = examine(home or default_home())
    show(findings, Console(highlight=False), as_json=as_json)
    sys.exit(ExitCode.FAILED if any(finding.wrong for finding in findings) else ExitCode.OK)
