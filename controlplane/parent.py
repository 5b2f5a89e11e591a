"""Ties a process's life to its parent's.

Layer: service. Linux only; elsewhere it does nothing. `local/shim.py` does the same for other programs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies. Call it from the main thread."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it was gone before the kernel knew
