"""`tidegate serve|worker|db`: one control-plane process each.

Layer: service. Starts servers and prints one sentence when it cannot; it decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import click

from controlplane.settings import LOG_LEVELS, Secret, Settings, SettingsError, require_database_url

Answer = TypeVar("Answer")

DEFAULT_PORTS = {"gateway": 7301, "control": 7300}
LEAST_CONNECTIONS = 4096
"""Served at once, however few requests may be in flight."""

YOUNG_OBJECTS = 10_000
"""New objects between two searches for garbage: requests in flight hold thousands, and nearly none is in a cycle."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PORT_IN_USE = 3
EXIT_UNREACHABLE = 6


@click.command()
@click.argument("role", type=click.Choice(sorted(DEFAULT_PORTS)))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Default: control 7300, gateway 7301.")
def serve(role: str, host: str, port: int | None) -> None:
    """Serve ROLE, configured by the environment, until SIGTERM or Ctrl-C."""
    import uvloop

    from controlplane.http.server import StartError
    from controlplane.logs import configure_logging

    settings = _settings()
    configure_logging(settings)
    port = DEFAULT_PORTS[role] if port is None else port
    listening = _listening(host, port)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(role, settings, listening))
    except (StartError, OSError) as error:
        _fail(f"cannot serve {role} on {host}:{port}: {error}", EXIT_FAILED)


async def _serve(role: str, settings: Settings, listening: socket.socket) -> None:
    from controlplane.app import Role, create_app
    from controlplane.http.server import HttpServer

    application = create_app(Role(role), settings)
    gc.collect()
    gc.freeze()  # what lives as long as the process is not searched for garbage again, which stops every request
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    server = HttpServer(application, listening, most_connections=max(LEAST_CONNECTIONS, 2 * settings.max_in_flight))
    await server.serve((signal.SIGTERM, signal.SIGINT))


@click.command()
@click.option("--log-level", type=click.Choice(LOG_LEVELS, case_sensitive=False), default="INFO", show_default=True)
def worker(log_level: str) -> None:
    """Run the Celery worker, with beat, until SIGTERM or Ctrl-C."""
    settings = _settings()
    from controlplane.worker import run

    run(settings, log_level=log_level)


@click.group()
def db() -> None:
    """Migrate the database of DATABASE_URL."""


@db.command()
@click.option("--revision", default="head", show_default=True, help="Where to go.")
def upgrade(revision: str) -> None:
    """Bring the schema to this version; harmless when it is there."""
    from controlplane import migrate

    url = _database_url()
    before = _reach(lambda: migrate.current(url))
    _reach(lambda: migrate.upgrade(url, revision))
    after = _reach(lambda: migrate.current(url))
    click.echo(f"the schema is at {after}" + ("" if after == before else f" (was {before or 'empty'})"))


@db.command()
def current() -> None:
    """Print where the schema is; exit code 1 when an upgrade is due."""
    from controlplane import migrate

    url = _database_url()
    found, newest = _reach(lambda: migrate.current(url)), migrate.head()
    if found != newest:
        _fail(
            f"the schema is at {found or 'nothing'}, this version needs {newest}: run `tidegate db upgrade`",
            EXIT_FAILED,
        )
    click.echo(f"the schema is at {found}, the newest")


def _settings() -> Settings:
    try:
        return Settings.from_env()
    except SettingsError as error:
        _fail(str(error), EXIT_USAGE)


def _database_url() -> Secret:
    url = Secret(os.environ.get("DATABASE_URL", ""))
    if not url:
        _fail("DATABASE_URL is not set", EXIT_USAGE)
    try:
        require_database_url(url)
    except SettingsError as error:
        _fail(str(error), EXIT_USAGE)
    return url


def _reach(action: Callable[[], Answer]) -> Answer:
    """`action`'s answer, or one sentence when the database is away, forbidden or newer than this version."""
    from alembic.util import CommandError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return action()
    except CommandError as error:
        _fail(f"cannot migrate: {error}", EXIT_FAILED)
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        _fail(f"cannot use the database of DATABASE_URL: {reason}", EXIT_UNREACHABLE)


def _listening(host: str, port: int) -> socket.socket:
    """A socket bound there, so that what is in the way is said before anything starts."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        _fail(f"--host {host!r} is not an IP address such as 127.0.0.1 or 0.0.0.0", EXIT_USAGE)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRNOTAVAIL:
            _fail(f"--host {host} is not an address of this machine", EXIT_USAGE)
        _fail(f"cannot listen on {host}:{port}: {error.strerror}; pass another --port", EXIT_PORT_IN_USE)
    return listening


def _fail(sentence: str, code: int) -> NoReturn:
    click.echo(f"tidegate: {sentence}", err=True)
    sys.exit(code)
