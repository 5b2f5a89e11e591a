"""The plain relay passes everything on as it is, as it comes, and ends with whoever started it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controlplane.lab.bench import plain_relay
from controlplane.lab.bench.deployment import post
from controlplane.lab.bench.engine import MAX_BODY, RECEIPT
from controlplane.lab.bench.requests import Target, body
from dataplane.bench.processes import tree
from tests.controlplane.lab.bench.conftest import MODEL, FakeEngine
from tests.controlplane.lab.bench.exchanges import chunks, complete, exchange
from tests.controlplane.local.processes import is_alive, python, read_line, wait_until
from tests.services import free_port

STARTER = """
import sys, time
from pathlib import Path
from controlplane.lab.bench import plain_relay
folder = Path(sys.argv[3])
child = plain_relay.start(int(sys.argv[1]), int(sys.argv[2]), log=folder / "log", cwd=folder)
print(child.pid, flush=True)
time.sleep(60)
"""


def answers(port: int) -> bool:
    """True when something listens on `port`."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def relaying(engine_port: int, folder: Path) -> Iterator[int]:
    """The port of a running relay."""
    port = free_port()
    child = plain_relay.start(port, engine_port, log=folder / "log", cwd=folder)
    try:
        assert wait_until(lambda: answers(port) or child.returncode is not None)
        assert child.returncode is None, (folder / "log").read_text()
        yield port
    finally:
        child.stop(signal.SIGTERM, 5.0)


@pytest.fixture(scope="module")
def relay(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with relaying(engine.port, tmp_path_factory.mktemp("relay")) as port:
        yield port


def test_a_whole_answer_comes_byte_for_byte_whatever_its_status(engine: FakeEngine, relay: int) -> None:
    unreadable = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 7\r\n\r\nno json"
    for request, status in ((engine.request(tokens=300), b"200"), (unreadable, b"400")):
        head, direct = exchange(engine.port, request.replace(b"POST / ", b"POST /v1/chat/completions "))
        relayed_head, relayed = exchange(relay, request)
        assert relayed == direct != b""
        assert head.split()[1] == relayed_head.split()[1] == status
        assert b"content-type: application/json" in relayed_head


def test_a_stream_comes_byte_for_byte(engine: FakeEngine, relay: int) -> None:
    request = engine.request(tokens=400, stream=True)
    _, direct = exchange(engine.port, request)
    head, relayed = exchange(relay, request)
    assert head.startswith(b"HTTP/1.1 200")
    assert b"content-type: text/event-stream" in head
    assert b"".join(chunks(relayed)) == b"".join(chunks(direct))


def test_a_stream_is_passed_on_chunk_by_chunk(engine: FakeEngine, relay: int) -> None:
    """The engine writes no token before the receipt of the one before: a relay that waits for more never ends."""
    with (
        socket.create_connection(("127.0.0.1", relay), 10) as connection,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receipts,
    ):
        connection.sendall(engine.request(tokens=5, stream=True, pace={"stream": "91"}))
        received = b""
        for token in range(1, 6):
            while received.count(b'"content":" ') < token:
                received += connection.recv(65536)
            assert received.count(b'"content":" ') == token
            receipts.sendto(RECEIPT.pack(91), ("127.0.0.1", engine.port))
        while not complete(received):
            received += connection.recv(65536)
    assert b"[DONE]" in received


def test_the_engine_is_left_with_the_client_and_its_absence_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        engine_port = server.getsockname()[1]
        with relaying(engine_port, tmp_path) as port:
            target = Target("relay", port, "none", MODEL)
            client = socket.create_connection(("127.0.0.1", port), 10)
            client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            upstream, _ = server.accept()
            with upstream:
                upstream.settimeout(10)
                assert upstream.recv(65536).startswith(b"POST /v1/chat/completions ")
                upstream.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
                received = b""
                while not received.endswith(b"hi\r\n"):
                    received += client.recv(65536)
                client.close()
                while upstream.recv(65536):
                    pass
            server.close()
            status, said = post(target, body(target, tokens=1))
    assert (status, said.startswith("The plain relay: http://127.0.0.1:")) == (502, True)


def test_a_stream_that_the_engine_breaks_off_does_not_look_whole(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        with (
            relaying(server.getsockname()[1], tmp_path) as port,
            socket.create_connection(("127.0.0.1", port), 10) as client,
        ):
            client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            upstream, _ = server.accept()
            upstream.recv(65536)
            upstream.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
            upstream.close()
            received = b""
            while data := client.recv(65536):
                received += data
    assert b"hi" in received
    assert not complete(received)


def test_a_body_too_large_is_refused(relay: int) -> None:
    target = Target("relay", relay, "none", MODEL)
    assert post(target, b" " * (MAX_BODY + 1))[0] == 413


def test_it_ends_with_whoever_started_it(engine: FakeEngine, tmp_path: Path) -> None:
    port = free_port()
    with python(STARTER, str(port), str(engine.port), str(tmp_path)) as starter:
        pid = int(read_line(starter))
        assert wait_until(lambda: answers(port)), (tmp_path / "log").read_text()
        processes = tree(pid)
        assert len(processes) >= 2, "granian's main process and its worker"
        os.kill(starter.pid, signal.SIGKILL)
        assert wait_until(lambda: not any(is_alive(each) for each in processes))
    assert not answers(port)
