"""One child process, started so that it cannot outlive its parent and can be waited for without polling.

Layer: service. `spawn` must be called from the main thread: the kernel ties the parent-death signal to the
thread that forked. It never decides whether a child is restarted (`supervisor` does).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SHIM = Path(__file__).with_name("shim.py")


class Child:
    """A started process: its own session, its own process group, an open pidfd until `close`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self.pidfd: int | None = os.pidfd_open(process.pid)
        self._asked = False

    @property
    def returncode(self) -> int | None:
        """The exit status once it ended (negative: the signal that ended it), None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float) -> int | None:
        """Wait up to `timeout` seconds for the end; the exit status, or None when it still runs."""
        if self.pidfd is not None:
            wait_readable(self.pidfd, timeout)
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def send_group(self, number: signal.Signals) -> None:
        """Reach the process and every descendant that stayed in its group, also after it ended itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def ask(self, number: signal.Signals) -> None:
        """Ask it once to end, however often this is called: a second signal means hurry to many programs."""
        if not self._asked:
            self._asked = True
            self.send(number)

    def stop(self, number: signal.Signals, grace: float) -> int:
        """Ask with `number`, wait `grace` seconds, then kill the whole group. Returns the exit status."""
        self.ask(number)
        status = self.wait(grace)
        self.send_group(signal.SIGKILL)
        if status is None:
            status = self._process.wait()
        self.close()
        return status

    def close(self) -> None:
        """Give the pidfd back; the child must have ended."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def wait_readable(descriptor: int, timeout: float) -> bool:
    """True as soon as `descriptor` is readable (a pidfd: its process ended), False after `timeout` seconds."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(timeout, 0.0) * 1000.0))


def wrap(
    command: Sequence[str | Path],
    *,
    death_signal: signal.Signals,
    user: str | None = None,
    reach: Sequence[Path] = (),
) -> list[str]:
    """`command` behind the shim; see `shim` for what `user` and `reach` do."""
    needed = ":".join(str(path) for path in reach)
    launch = [sys.executable, "-I", "-S", str(SHIM), str(os.getpid()), str(int(death_signal)), user or "-", needed]
    return [*launch, "--", *(str(part) for part in command)]


def spawn(
    name: str,
    command: Sequence[str | Path],
    *,
    log: Path,
    environment: Mapping[str, str],
    cwd: Path,
    death_signal: signal.Signals = signal.SIGTERM,
    user: str | None = None,
    reach: Sequence[Path] = (),
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `command` with its output appended to `log`. Raises OSError when the log or the fork fails."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(  # noqa: S603 - fixed argument list, no shell
            wrap(command, death_signal=death_signal, user=user, reach=reach),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    finally:
        os.close(descriptor)
    return Child(name, process)
