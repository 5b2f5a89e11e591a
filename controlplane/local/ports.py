"""Loopback ports: finding free ones and seeing that one is taken.

Layer: service. A port is only ever looked at here; the server that wants it binds it itself.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from controlplane.local.errors import ExitCode, LocalError

LOOPBACK = "127.0.0.1"


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """`count` different ports that nobody listens on right now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """True when a server could bind `port` now (ports in TIME_WAIT count as free, as servers see them)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise LocalError(f"--host {host} is not an address of this machine", ExitCode.USAGE) from None
            return False
    return True


def require_free(port: int, what: str, flag: str, host: str = LOOPBACK) -> None:
    """Raise LocalError naming the port and the flag that moves it."""
    if not is_free(port, host):
        raise LocalError(
            f"port {port} for {what} is in use; stop what listens there or pass {flag} with another port",
            ExitCode.PORT_IN_USE,
        )
