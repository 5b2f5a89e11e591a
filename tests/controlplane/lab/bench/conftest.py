"""A running fake engine, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from controlplane.lab.bench.requests import Target, body, request
from controlplane.local.process import answers_ok
from tests.services import free_port

MODEL = "bench-model"


@dataclass(frozen=True)
class FakeEngine:
    target: Target

    @property
    def port(self) -> int:
        return self.target.port

    def request(self, **options: object) -> bytes:
        return request(self.target, body(self.target, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="package")
def engine() -> Iterator[FakeEngine]:
    port = free_port()
    command = [sys.executable, "-m", "controlplane.lab.bench.engine", "--port", str(port), "--model", MODEL]
    process = subprocess.Popen(command, env=dict(os.environ))
    try:
        deadline = time.monotonic() + 30
        while not answers_ok(f"http://127.0.0.1:{port}/healthz"):
            assert process.poll() is None, "the fake engine ended"
            assert time.monotonic() < deadline, "the fake engine did not start"
            time.sleep(0.05)
        yield FakeEngine(Target("engine", port, "key", MODEL))
    finally:
        process.terminate()
        process.wait(10)
