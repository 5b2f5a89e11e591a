"""The fake engine answers byte for byte as a replica's front would, at the pace it is asked for."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from controlplane.lab.bench import wire
from controlplane.lab.bench.engine import RECEIPT, Connection, Engine
from dataplane.openai_bodies import DONE, Answer, Responder, usage
from tests.controlplane.lab.bench.conftest import MODEL, FakeEngine
from tests.controlplane.lab.bench.exchanges import chunks, complete, exchange


def responder() -> Responder:
    return Responder(response_id=wire.RESPONSE_ID, model=MODEL, created=wire.CREATED, chat=True, show_null_usage=False)


def send(engine: FakeEngine, request: bytes) -> tuple[bytes, bytes]:
    return exchange(engine.port, request)


def expected_events(tokens: int) -> list[bytes]:
    """What the native replica's own code renders for the same words."""
    made = responder()
    words = [wire.WORDS[i % len(wire.WORDS)] for i in range(tokens)]
    return [made.opening(0), *(made.text(0, word) for word in words), made.closing(0, "length")]


def test_a_stream_is_byte_for_byte_what_a_replica_streams(engine: FakeEngine) -> None:
    head, body = send(engine, engine.request(tokens=11, stream=True))
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: text/event-stream" in head
    assert chunks(body) == [*expected_events(11), DONE, b""]


def test_usage_comes_only_when_asked_for_and_is_a_replicas(engine: FakeEngine) -> None:
    asked = json.dumps({"stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(asked), asked)
    _, body = send(engine, request)
    assert chunks(body) == [*expected_events(2), responder().usage(usage(500, 2, 0)), DONE, b""]


def test_a_whole_answer_is_byte_for_byte_a_replicas(engine: FakeEngine) -> None:
    _, body = send(engine, engine.request(tokens=9))
    text = "".join(wire.WORDS[i % len(wire.WORDS)] for i in range(9))
    assert body == responder().whole([Answer(text=text, finish="length")], usage(500, 9, 0))


async def test_requests_on_one_connection_are_answered_in_order_wherever_they_are_cut(engine: FakeEngine) -> None:
    """Each piece is sent when the one before it has been read, so that none is joined to the next on the way."""
    both, pieces = engine.request(tokens=1, stream=True) + engine.request(tokens=2), asyncio.Semaphore(0)

    class Heard(Connection):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            pieces.release()

    shared = Engine(wire.Answers(MODEL))
    server = await asyncio.get_running_loop().create_server(lambda: Heard(shared), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    async with asyncio.timeout(10):
        for at in range(0, len(both), 700):
            writer.write(both[at : at + 700])
            await pieces.acquire()
        received = b""
        while not received.endswith(b"}") or received.count(b"HTTP/1.1 200 OK") < 2:
            received += await reader.read(65536)
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()
    assert received.index(b"[DONE]") < received.index(b'"chat.completion"')


def test_a_late_answer_is_late_and_a_paced_stream_takes_its_gaps(engine: FakeEngine) -> None:
    for request, least in (
        (engine.request(tokens=1, pace={"first_ms": "80"}), 0.08),
        (engine.request(tokens=5, stream=True, pace={"token_ms": "20"}), 0.08),
    ):
        begun = time.monotonic()
        send(engine, request)
        assert time.monotonic() - begun >= least * 0.95  # the loop's clock is that of milliseconds


def test_an_acknowledged_stream_sends_nothing_before_its_receipt(engine: FakeEngine) -> None:
    with (
        socket.create_connection(("127.0.0.1", engine.port), 10) as connection,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receipts,
    ):
        connection.sendall(engine.request(tokens=3, stream=True, pace={"stream": "77"}))
        received = b""
        for token in (1, 2, 3):
            while received.count(b'"content":" ') < token:
                received += connection.recv(65536)
            connection.settimeout(0.1)
            with pytest.raises(TimeoutError):
                connection.recv(65536)
            connection.settimeout(10)
            receipts.sendto(RECEIPT.pack(77) + RECEIPT.pack(12345), ("127.0.0.1", engine.port))
        while not complete(received):
            received += connection.recv(65536)
    assert chunks(received.partition(b"\r\n\r\n")[2])[-2:] == [DONE, b""]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no json", b"400"),
        (b'{"stream":true,"metadata":{"first_ms":"soon"}}', b"400"),
        (b'{"metadata":{"token_ms":"-1"}}', b"400"),
    ],
)
def test_what_cannot_be_read_is_refused(engine: FakeEngine, body: bytes, status: bytes) -> None:
    head, answer = send(
        engine, b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )
    assert head.split()[1] == status
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


def test_other_paths_are_not_found(engine: FakeEngine) -> None:
    head, _ = send(engine, b"GET /v1/models HTTP/1.1\r\n\r\n")
    assert head.split()[1] == b"404"
