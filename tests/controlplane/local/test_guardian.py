"""The guardian ends what a killed supervisor leaves, and nothing else."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys

from controlplane.local.guardian import MARK, Guardian
from tests.controlplane.local import processes

FAMILY = """
import os, signal, subprocess, sys
from controlplane.local.guardian import MARK, Guardian
guardian = Guardian(sys.argv[1])
stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
environment = {**os.environ, MARK: sys.argv[1]}
child = subprocess.Popen([sys.executable, "-c", f'''
import subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-c", {stubborn!r}], start_new_session=True)
print(grandchild.pid, flush=True)
{stubborn}
'''], env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True)
guardian.watch(child.pid)
print(guardian.pid, child.pid, child.stdout.readline().strip(), flush=True)
if sys.stdin.read(1) == "d":
    guardian.dismiss()
    print("dismissed", flush=True)
    sys.stdin.read()
"""


def test_a_killed_supervisor_leaves_no_child_no_grandchild_and_no_guardian() -> None:
    """Both ignore SIGTERM, and the grandchild left the group: the mark in its environment gives it away."""
    with processes.python(FAMILY, secrets.token_hex(8)) as supervisor:
        pids = [int(pid) for pid in processes.read_line(supervisor).split()]
        assert all(processes.is_alive(pid) for pid in pids)
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
        assert processes.wait_until(lambda: not any(processes.is_alive(pid) for pid in pids)), pids


def test_a_dismissed_guardian_goes_without_acting() -> None:
    with processes.python(FAMILY, secrets.token_hex(8)) as supervisor:
        guardian, child, grandchild = (int(pid) for pid in processes.read_line(supervisor).split())
        assert supervisor.stdin is not None
        supervisor.stdin.write("d")
        supervisor.stdin.flush()
        assert processes.read_line(supervisor) == "dismissed"
        assert not processes.is_alive(guardian)
        assert processes.is_alive(child)
        assert processes.is_alive(grandchild)
        for pid in (child, grandchild):
            os.kill(pid, signal.SIGKILL)


def test_others_and_forgotten_groups_are_left_alone() -> None:
    sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
    mark = secrets.token_hex(8)
    forgotten = subprocess.Popen(sleeper, start_new_session=True)
    other = subprocess.Popen(sleeper, start_new_session=True, env={**os.environ, MARK: "of-another-run"})
    try:
        guardian = Guardian(mark)
        guardian.watch(forgotten.pid)
        guardian.forget(forgotten.pid)
        guardian.close()  # end of file without a farewell, as after a kill
        assert not processes.is_alive(guardian.pid)
        assert processes.is_alive(forgotten.pid)
        assert processes.is_alive(other.pid)
    finally:
        for each in (forgotten, other):
            each.kill()
            each.wait()
