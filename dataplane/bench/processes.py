"""A process and its children from outside: which cores they run on, what CPU time they took, what memory they hold.

Layer: service. Torch-free. Reads /proc and sets affinities; it starts and ends nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(pid: int) -> list[int]:
    """`pid` and its living descendants."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        tasks = PROC / str(current) / "task"
        if not tasks.exists():
            continue
        found.append(current)
        for task in _entries(tasks):
            with contextlib.suppress(OSError):
                queue += [int(child) for child in (task / "children").read_text().split()]
    return found


def pin(pid: int, cores: Collection[int]) -> None:
    """Keep every thread of `pid` and its descendants on `cores`; those they start later inherit it."""
    for process in tree(pid):
        for task in _entries(PROC / str(process) / "task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cores)


def cpu_seconds(pid: int) -> float:
    """CPU time that `pid` and its living descendants have taken, user and system."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            fields = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


def resident_bytes(pid: int) -> int:
    """Physical memory of `pid` and its living descendants; pages they share count for each."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            total += int((PROC / str(process) / "statm").read_text().split()[1]) * PAGE
    return total


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
