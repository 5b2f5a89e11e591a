"""`tidegate`: the one console script.

Layer: service. A sub-command's module is loaded only when it is called, so `tidegate --help` stays fast and
the control plane never imports torch.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from importlib.metadata import version

import click

COMMANDS = {
    "up": ("controlplane.local.cli:up", "Start everything on this machine and supervise it."),
    "doctor": ("controlplane.local.cli:doctor", "Print what was found on this machine and what is wrong."),
    "backup": ("controlplane.local.backup_cli:backup", "Back up this machine's data folder and database."),
    "restore": ("controlplane.local.backup_cli:restore", "Restore a backup into an empty data folder."),
    "tenant": ("controlplane.tenants.cli:tenant", "Create, list and change tenants."),
    "project": ("controlplane.tenants.project_cli:project", "Create, list and change a tenant's projects."),
    "principal": ("controlplane.tenants.principal_cli:principal", "Create, list and change who owns a tenant's keys."),
    "key": ("controlplane.tenants.key_cli:key", "Create, list, rotate and revoke API keys."),
    "user": ("controlplane.accounts.cli:user", "Create, list and change who may log in to the console."),
    "token": ("controlplane.accounts.cli:token", "Create, list and revoke tokens of the admin API."),
    "pool": ("controlplane.fleet.cli:pool", "List pools, and say what their replicas hold."),
    "replica": ("controlplane.fleet.cli:replica", "List replicas, and drain them."),
    "quota": ("controlplane.quotas.cli:quota", "Limit tenants, raise limits, decide on requests for more."),
    "price": ("controlplane.quotas.price_cli:price", "Set and list prices of pools."),
    "slo": ("controlplane.slo.cli:slo", "Promise latencies and availability to tenants."),
    "canary": ("controlplane.canaries.cli:canary", "See when each limit was last proven, and prove them now."),
    "policy": ("controlplane.policy.cli:policy", "Show the policy's epoch everywhere, take changes back."),
    "usage": ("controlplane.ledger.cli:usage", "Sum, export and bill what tenants used."),
    "prompts": ("controlplane.promptlog.cli:prompts", "Keep a tenant's prompts, redacted, or stop; read them."),
    "serve": ("controlplane.serve:serve", "Run one control-plane process: gateway or control."),
    "worker": ("controlplane.serve:worker", "Run the Celery worker, with beat."),
    "db": ("controlplane.serve:db", "Migrate the database."),
    "engine": ("dataplane.cli:engine", "Run or try the engine alone."),
    "chaos": ("controlplane.lab.chaos.cli:chaos", "Break a running deployment in turn, and check what must hold."),
    "bench": ("controlplane.lab.bench.cli:bench", "Measure the engine, its policies and the gateway, with controls."),
}


class LazyGroup(click.Group):
    """A group whose members are imported when called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse, for all commands at once, what is no text: it could be neither sent, stored nor printed."""
        for argument in args:
            raw = os.fsencode(argument)
            try:
                raw.decode()
            except UnicodeDecodeError:
                click.echo(
                    f"tidegate: the argument {raw.decode(errors='backslashreplace')} is not UTF-8 text", err=True
                )
                sys.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("tidegate"), prog_name="tidegate")
def main() -> None:
    """Tidegate: the control plane in front of LLM inference, and the engine behind it."""
    atexit.register(gc.freeze)  # a last collection of all that was imported would take the end of a process seconds
