"""`tidegate chaos` itself, on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = ("redis-empty", "replica-kill", "postgres-frozen")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_f7_f12_f14_f15_faults_under_load_leave_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "controlplane", "chaos", "--quick", "--json", str(path)]
    for fault in FAULTS:
        command += ["--only", fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["bench"] == "chaos"
    assert set(found["results"]["faults"]) == set(FAULTS)
    for fault in found["results"]["faults"].values():
        assert fault["answers"]["ok"] > 20
        assert fault["difference"]["attempts"] > 20
        assert fault["difference"]["tokens"] == 0
        assert fault["leaked"] == 0
        assert not {answer for answer in fault["answers"]["refused"] if answer.startswith("401")}
        assert fault["problems"] == []
