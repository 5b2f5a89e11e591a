"""The load generators against the fake engine: what they count is what was sent."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time

import pytest

from controlplane.lab.bench import closed, openloop, streams
from controlplane.lab.bench.closed import LoadError
from controlplane.lab.bench.quantiles import quantile
from controlplane.lab.bench.responses import BrokenResponseError, ResponseReader
from controlplane.lab.bench.wire import STREAM_HEAD, Answers
from tests.controlplane.lab.bench.conftest import FakeEngine
from tests.services import free_port


def stream_bytes(tokens: int) -> bytes:
    answers = Answers("m")
    words = [answers.tokens[i % len(answers.tokens)] for i in range(tokens)]
    return STREAM_HEAD + answers.opening + b"".join(words) + answers.closing + answers.done + b"0\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 191, 5000])
def test_a_stream_is_counted_alike_wherever_it_is_cut(step: int) -> None:
    whole = stream_bytes(20)
    reader = ResponseReader()
    parts = [whole[at : at + step] for at in range(0, len(whole), step)]
    assert not any(reader.feed(part) for part in parts[:-1])
    assert reader.feed(parts[-1])
    assert (reader.status, reader.stream.tokens, reader.stream.done) == (200, 20, True)
    assert reader.stream.writes == 24  # role, tokens, finish, [DONE], the empty last one


def test_a_content_length_is_counted_and_anything_else_is_broken() -> None:
    reader = ResponseReader()
    assert not reader.feed(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nConnection: close\r\n\r\nab")
    assert reader.feed(b"cd")
    assert (reader.status, reader.closes) == (503, True)
    for wrong in (b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"):
        with pytest.raises(BrokenResponseError):
            ResponseReader().feed(wrong)


def test_arms_take_turns_and_a_late_arm_is_late(engine: FakeEngine) -> None:
    found = closed.take_turns(
        {
            "plain": (engine.port, engine.request(tokens=1)),
            "late": (engine.port, engine.request(tokens=1, pace={"first_ms": "20"})),
            "stream": (engine.port, engine.request(tokens=3, stream=True, pace={"token_ms": "10"})),
        },
        seconds=0.5,
        block=3,
        warm_up=1,
    )
    counts = {len(timings.total) for timings in found.values()}
    assert len(counts) == 1
    assert counts.pop() % 3 == 0
    late = quantile(found["late"].total, 0.5) - quantile(found["plain"].total, 0.5)
    assert late >= 0.015
    assert found["plain"].first == []
    stream = found["stream"]
    assert all(first < total - 0.015 for first, total in zip(stream.first, stream.total, strict=True))


def test_a_refusal_or_nobody_there_is_said(engine: FakeEngine) -> None:
    with (
        closed.Caller("engine", engine.port, b"GET / HTTP/1.1\r\n\r\n") as caller,
        pytest.raises(LoadError, match="status 404"),
    ):
        caller.call()
    port = free_port()
    with closed.Caller("nobody", port, b"") as caller, pytest.raises(LoadError, match=f"nobody on port {port}"):
        caller.call()
    with pytest.raises(LoadError, match=f"port {port}"):
        openloop.run(port, b"", [0.0])
    with pytest.raises(LoadError, match=f"port {port}"):
        streams.run(port, [b""], seconds=0.1)


def test_arrivals_are_poisson_and_repeat_with_their_seed() -> None:
    times = openloop.arrivals(300, 100, random.Random(3))
    assert times == openloop.arrivals(300, 100, random.Random(3)) == sorted(times)
    assert times[-1] < 100
    assert abs(len(times) - 30_000) < 5 * 30_000**0.5
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert quantile(gaps, 0.5) == pytest.approx(0.693 / 300, rel=0.05)


def test_an_open_loop_sends_all_that_is_due_and_counts_by_status(engine: FakeEngine) -> None:
    due = openloop.arrivals(200, 0.5, random.Random(1))
    run = openloop.run(engine.port, engine.request(tokens=1), due, connections=1)
    assert (len(run.times(200)), run.answered, run.lost, run.crowded) == (len(due), len(due), 0, 0)
    assert len(run.late_s) == len(due)
    refused = openloop.run(engine.port, b"GET / HTTP/1.1\r\n\r\n", [0.0, 0.0, 0.01])
    assert {status: len(times) for status, times in refused.by_status.items()} == {404: 3}


def test_a_server_that_stalls_cannot_hide_behind_the_load() -> None:
    """No coordinated omission: what was due during a stall is as late as the stall made it."""
    stall = 0.3
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    ready = threading.Event()

    def serve() -> None:
        """One thread answers all connections; before the first answer it stands still."""
        server.settimeout(0.05)
        connections: list[socket.socket] = []
        ready.set()
        stalled, until = False, time.monotonic() + 2
        while time.monotonic() < until and not done.is_set():
            try:
                connections.append(server.accept()[0])
                connections[-1].setblocking(False)
            except TimeoutError:
                pass
            for connection in connections:
                try:
                    asked = connection.recv(65536).count(b"GET")
                except BlockingIOError:
                    continue
                if asked and not stalled:
                    stalled = True
                    time.sleep(stall)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n" * asked)
        for connection in connections:
            connection.close()

    done = threading.Event()
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    ready.wait()
    try:
        run = openloop.run(port, b"GET / HTTP/1.1\r\n\r\n", [i * 0.02 for i in range(20)], connections=20)
    finally:
        done.set()
        thread.join()
        server.close()
    assert len(run.times(200)) == 20
    held_up = [seconds for seconds in run.times(200) if seconds > stall / 4]
    assert len(held_up) >= 8, "a closed loop would have met the stall once"


@pytest.mark.parametrize("single", [False, True])
def test_streams_are_counted_token_by_token(engine: FakeEngine, single: bool) -> None:
    requests = [
        engine.request(tokens=20, stream=True, pace={"stream": str(number)} if single else None) for number in range(4)
    ]
    marks: list[str] = []
    run = streams.run(
        engine.port,
        requests,
        seconds=0.5,
        warm_up=0.1,
        receipts=engine.port if single else None,
        on_begin=lambda: marks.append("begin"),
        on_end=lambda: marks.append("end"),
    )
    assert marks == ["begin", "end"]
    assert run.streams > 8
    # a stream in 20 tokens: role, finish, [DONE] and the end are writes without a token
    assert run.tokens == pytest.approx(20 * run.streams, abs=4 * 20)
    assert run.writes == pytest.approx(24 * run.streams, abs=4 * 24)
    assert len(run.first) == run.streams
    assert run.tokens_per_s == run.tokens / run.seconds


def test_a_stream_that_breaks_off_is_a_failure() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        connection.recv(65536)
        connection.sendall(stream_bytes(3)[:-20])
        connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(LoadError, match="closed"):
        streams.run(server.getsockname()[1], [b"GET / HTTP/1.1\r\n\r\n"], seconds=5)
    thread.join()
    server.close()
