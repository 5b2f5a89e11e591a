"""A running fake engine, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from controlplane.lab.bench.requests import Target, body, request
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
    process = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"listening on 127.0.0.1:{port}\n", "the fake engine ended"
            yield FakeEngine(Target("engine", port, "key", MODEL))
        finally:
            process.terminate()
            process.wait(10)
