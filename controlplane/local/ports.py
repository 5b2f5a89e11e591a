"""Loopback ports: finding free ones and seeing that one is taken.

Layer: service. A port is only ever looked at here; the server that wants it binds it itself.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import socket
from collections.abc import Iterable
from typing import NamedTuple

from controlplane.local.errors import ExitCode, LocalError

LOOPBACK = "127.0.0.1"


class Listener(NamedTuple):
    """A port, who listens there, and the flag that moves it."""

    port: int
    what: str
    flag: str
    host: str = LOOPBACK


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """`count` different ports that nobody listens on right now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """True when a server could bind `port` now (ports in TIME_WAIT count as free, as servers see them)."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise LocalError(f"--host {host} is not an address of this machine", ExitCode.USAGE) from None
            return False
    return True


def require_address(host: str) -> None:
    """Raise LocalError unless `host` is an IP address: a name may mean several, and the servers listen on one."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise LocalError(
            f"--host {host!r} is not an IP address such as {LOOPBACK} or 0.0.0.0", ExitCode.USAGE
        ) from None


def require_distinct(listeners: Iterable[Listener]) -> None:
    """Raise LocalError naming both flags when two services were given one port."""
    for one, other in itertools.combinations(listeners, 2):
        if one.port == other.port:
            raise LocalError(
                f"{one.flag} and {other.flag} are both {one.port}; {one.what} and {other.what} need a port each",
                ExitCode.USAGE,
            )


def require_free(listener: Listener) -> None:
    """Raise LocalError naming the port and the flag that moves it."""
    if not is_free(listener.port, listener.host):
        raise LocalError(
            f"port {listener.port} for {listener.what} is in use; "
            f"stop what listens there or pass {listener.flag} with another port",
            ExitCode.PORT_IN_USE,
        )
