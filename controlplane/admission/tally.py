"""What happened to one process's leases since it started, for its metrics. Layer: service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts that only grow."""

    granted: int = 0
    refused: int = 0
    cold: int = 0
    not_answered: int = 0
    """Calls the store did not answer by their deadline, or at all."""
    not_asked: int = 0
    """Calls not made because the store had just failed."""
    away_refused: int = 0
    away_local: int = 0
    away_open: int = 0
    """Requests decided without the store: refused, counted in this process, let pass uncounted."""
    settled: int = 0
    overrun_units: int = 0
    late: int = 0
    fenced: int = 0
    deferred: int = 0
    """Endings the store is told later."""
    reasserted: int = 0
    """Leases that were made again after the store was lost, or revived after they had expired."""
