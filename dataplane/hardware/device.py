"""What this machine is: cores, memory, and the devices torch can see.

Layer: hardware. Torch is imported only inside the function that needs it, so that `tidegate doctor` and the
configuration can ask for memory without it.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Device:
    """One compute device. `memory_bytes` is its whole memory."""

    name: str
    kind: str
    memory_bytes: int
    cores: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found; `torch` is empty where it is not installed."""

    cores: int
    memory_bytes: int
    available_bytes: int
    torch: str
    devices: tuple[Device, ...]


def total_memory() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's limit if that is lower."""
    return min(_machine_memory(), _cgroup_number(CGROUP_LIMIT) or _machine_memory())


def available_memory() -> int:
    """Bytes that can be taken now without swapping."""
    free = _meminfo("MemAvailable") or _machine_memory()
    limit, used = _cgroup_number(CGROUP_LIMIT), _cgroup_number(CGROUP_USED)
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def resident_memory() -> int:
    """Bytes of physical memory this process holds."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def inspect() -> Machine:
    """Look at the machine. Imports torch if it is installed."""
    devices = [Device(name="cpu", kind="cpu", memory_bytes=total_memory(), cores=cores())]
    version = ""
    if importlib.util.find_spec("torch") is not None:
        import torch

        version = str(torch.__version__)
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(Device(properties.name, "cuda", properties.total_memory, properties.multi_processor_count))
    return Machine(cores(), total_memory(), available_memory(), version, tuple(devices))


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(key: str) -> int | None:
    if not MEMINFO.exists():
        return None
    for line in MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


def _cgroup_number(path: Path) -> int | None:
    """A control group's value, or None where there is no group or it sets no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
