"""A tiny process that outlives a killed supervisor just long enough to end what it left behind.

Layer: service. It holds the read end of a pipe whose write end only the supervisor has: end of file without a
farewell means the supervisor died. It then ends every process group it was told of, and every process that
carries this run's mark in its environment (grandchildren that left their group), and goes. It uses the standard
library only, starts nothing, and never acts while its supervisor lives.

Lines on the pipe: `watch PID`, `forget PID`, `farewell`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "TIDEGATE_SUPERVISION"
"""Environment variable whose value names one run of a supervisor."""
GRACE_S = 3.0


class Guardian:
    """The supervisor's end of the pipe."""

    def __init__(self, mark: str) -> None:
        reading, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - fixed argument list, no shell
                [sys.executable, "-I", "-S", __file__, str(reading), mark],
                pass_fds=[reading],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(reading)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def watch(self, pid: int) -> None:
        """From now on `pid`'s process group ends with us."""
        self._tell(f"watch {pid}")

    def forget(self, pid: int) -> None:
        """`pid`'s group has ended; its number may be given to others."""
        self._tell(f"forget {pid}")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, f"{line}\n".encode())

    def dismiss(self) -> None:
        """Everything was stopped in order: let the guardian go without acting."""
        self._tell("farewell")
        self.close()

    def close(self) -> None:
        os.close(self._pipe)
        os.close(self.pidfd)
        self._process.wait()


def read_orders(reading: int) -> set[int] | None:
    """Follow the pipe to its end. The groups to end, or None after a farewell."""
    groups: set[int] = set()
    with os.fdopen(reading, "r", encoding="ascii") as orders:
        for line in orders:
            order, _, pid = line.strip().partition(" ")
            if order == "watch":
                groups.add(int(pid))
            elif order == "forget":
                groups.discard(int(pid))
            elif order == "farewell":
                return None
    return groups


def marked(mark: str) -> set[int]:
    """Processes whose environment carries this run's mark, ourselves excepted."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def send(groups: set[int], processes: set[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def wait_for(processes: set[int], seconds: float) -> None:
    """Until all of `processes` have ended, or `seconds` have passed."""
    poller = select.poll()
    waiting = {}
    for process in processes:
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(process)
            waiting[descriptor] = process
            poller.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(left * 1000.0):
            poller.unregister(descriptor)
            del waiting[descriptor]
            os.close(descriptor)


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    mark = sys.argv[2]
    groups = read_orders(int(sys.argv[1]))
    if groups is None:
        return
    left = marked(mark)
    send(groups, left, signal.SIGTERM)
    wait_for(groups | left, GRACE_S)
    # A second look: a process that was forking while we looked is found now.
    send(groups, left | marked(mark), signal.SIGKILL)


if __name__ == "__main__":
    main()
