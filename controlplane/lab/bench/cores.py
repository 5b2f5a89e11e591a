"""Which cores the gateway, the load and the rest run on.

Layer: service. Pure; `dataplane.bench.processes` looks at processes and sets their cores.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from controlplane.local.errors import ExitCode, LocalError


class Cores(NamedTuple):
    """Who runs where. `rest` are stores, control plane and worker: with two cores, the load's."""

    gateway: int
    load: int
    rest: frozenset[int]


def choose_cores(available: Collection[int]) -> Cores:
    """Raises LocalError when there are fewer than two."""
    cores = sorted(available)
    if len(cores) < 2:
        raise LocalError("the bench needs two CPU cores, one of them for the gateway alone", ExitCode.FAILED)
    gateway, load, *others = reversed(cores)
    return Cores(gateway, load, frozenset(others or [load]))
