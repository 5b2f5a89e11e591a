"""What is said of the machine agrees with the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dataplane.hardware import device


def test_memory_agrees_with_psutil() -> None:
    memory = psutil.virtual_memory()
    assert device.total_memory() <= memory.total
    assert 0 < device.available_memory() <= device.total_memory()
    resident = psutil.Process().memory_info().rss
    assert abs(device.resident_memory() - resident) < 0.2 * resident


def test_a_control_groups_limit_is_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CGROUP_LIMIT", "104857600\n"), ("CGROUP_USED", "100000000\n")):
        (tmp_path / name).write_text(value)
        monkeypatch.setattr(device, name, tmp_path / name)
    assert device.total_memory() == 104_857_600
    assert device.available_memory() == 4_857_600
    (tmp_path / "CGROUP_LIMIT").write_text("max\n")
    assert device.total_memory() > 104_857_600


def test_cores_are_those_of_this_process() -> None:
    assert device.cores() == len(os.sched_getaffinity(0))


def test_the_machine_is_described_with_torch_loaded_only_when_asked() -> None:
    found = device.inspect()
    assert found.devices[0].kind == "cpu"
    assert found.torch
    code = "import sys, dataplane.hardware.device as d; d.available_memory(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
