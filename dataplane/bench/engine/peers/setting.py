"""What every side is given, whoever it is.

Layer: service. Plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataplane.bench.engine.server import Launch
from dataplane.bench.environment import Environments
from dataplane.ports import free_port

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Setting:
    """`longest` is the most tokens of one request, `seats` the most requests at once. `folder` takes what a side needs
    besides its environment. `format` is the one of the weights that was asked for, "" for a peer's own."""

    model: Path
    longest: int
    seats: int
    threads: int
    folder: Path
    environments: Environments
    format: str = ""

    def address(self) -> tuple[int, str]:
        """A free port and the address of a server on it."""
        port = free_port(HOST, 0)
        return port, f"http://{HOST}:{port}"


Prepare = Callable[[Setting], Launch]
"""Installs what is needed and says how to start it. Raises NotToBeHadError."""
