"""Processes seen from outside: cores, CPU time and memory of a whole tree."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from controlplane.lab.bench.processes import Cores, choose_cores, cpu_seconds, pin, resident_bytes, tree
from controlplane.local.errors import LocalError

PARENT = """
import subprocess, sys
code = "import time; held = b'x' * (30 << 20); print(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code])
child.wait()
"""


def test_the_gateway_and_the_load_have_cores_of_their_own() -> None:
    assert choose_cores({0, 1}) == Cores(gateway=1, load=0, rest=frozenset({0}))
    assert choose_cores({2, 4, 6, 8}) == Cores(gateway=8, load=6, rest=frozenset({2, 4}))
    with pytest.raises(LocalError, match="two CPU cores"):
        choose_cores({3})


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
