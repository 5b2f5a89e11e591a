"""Becomes a server, bound to its parent's life and kept on some cores.

Layer: service. Run as a script by `server.Server`, with the standard library only; it never stays in memory.

    python -I -S launch.py PARENT_PID CORE,CORE… PROGRAM ARGUMENT…
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
EXIT_ORPHAN = 126


def main() -> None:
    parent, cores, *command = sys.argv[1:]
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(EXIT_ORPHAN)
    os.execvp(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
