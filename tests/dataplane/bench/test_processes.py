"""Processes seen from outside: cores, CPU time and memory of a whole tree."""

from __future__ import annotations

import os
import subprocess
import sys

from dataplane.bench.processes import cpu_seconds, pin, resident_bytes, tree

PARENT = """
import subprocess, sys
code = "import time; held = b'x' * (30 << 20); print(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code])
child.wait()
"""


def test_a_tree_is_measured_and_pinned_whole() -> None:
    core = min(os.sched_getaffinity(0))
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        parent.stdout.readline()
        found = tree(parent.pid)
        assert len(found) == 2
        assert resident_bytes(parent.pid) > 30 << 20
        assert cpu_seconds(parent.pid) > 0
        pin(parent.pid, {core})
        assert [os.sched_getaffinity(pid) for pid in found] == [{core}, {core}]
    finally:
        for pid in tree(parent.pid):
            os.kill(pid, 9)
        parent.wait()
        parent.stdout.close()
    assert tree(parent.pid) == []
    assert cpu_seconds(parent.pid) == resident_bytes(parent.pid) == 0
