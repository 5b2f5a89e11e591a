"""Scripted servers and prompts that need no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dataplane.bench.engine.client import Endpoint
from dataplane.bench.engine.server import Launch, Server
from dataplane.ports import free_port
from tests.dataplane.bench.engine.scripted import command, environment

Start = Callable[..., Server]


def launch_of(name: str, *flags: str, takes_ids: bool = True) -> Launch:
    port = free_port("127.0.0.1", 0)
    return Launch(
        endpoint=Endpoint(name, f"http://127.0.0.1:{port}", "bench", takes_ids=takes_ids),
        command=command(port, "--name", name, *flags),
        version="1",
        setup={"dtype": "none"},
        environment=environment(),
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a scripted server that is stopped after the test."""
    import os

    with ExitStack() as stack:

        def started(name: str, *flags: str) -> Server:
            server = Server(launch_of(name, *flags), cores=os.sched_getaffinity(0), log=tmp_path / f"{name}.log")
            return stack.enter_context(server)

        yield started
