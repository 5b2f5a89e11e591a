"""The HTTP client against servers that misbehave, byte by byte."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from controlplane.egress import EgressPolicy, parse_networks
from controlplane.gateway.guarded import GuardedAddresses
from controlplane.gateway.http_client import (
    HELD_BYTES,
    MAX_HEAD_BYTES,
    HttpError,
    HttpPool,
    LostError,
    ProtocolError,
    Response,
    SilentError,
    UnreachableError,
)
from tests.services import free_port

ADDRESSES = GuardedAddresses(EgressPolicy(parse_networks("127.0.0.0/8")))
OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"Content-Type: application/json; charset=utf-8\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nTrailer: z\r\n\r\n"
UNTIL_CLOSE = OK + b"connection: close\r\n\r\nhello"

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Speaks raw bytes: `speak` is called for every request, whose head and body have been read."""

    def __init__(self, speak: Speak) -> None:
        self.speak = speak
        self.connections = 0
        self.requests: list[bytes] = []
        self.url = ""
        self.tasks: set[asyncio.Task[None]] = set()
        self.writers: list[asyncio.StreamWriter] = []

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer))
        task.add_done_callback(lambda _: writer.close())
        self.tasks.add(task)
        self.writers.append(writer)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self.speak(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return


@asynccontextmanager
async def serving(speak: Speak, *, silence_s: float = 5.0) -> AsyncIterator[tuple[Server, HttpPool]]:
    server = Server(speak)
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/x"
    pool = HttpPool(silence_s, ADDRESSES)
    try:
        async with asyncio.timeout(20):
            yield server, pool
        assert pool.in_use == 0
    finally:
        pool.close()
        await asyncio.sleep(0.01)  # connections that were given up may still be on their way in
        listening.close()
        await asyncio.sleep(0)
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)
        for writer in server.writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in server.writers), return_exceptions=True)


def says(*pieces: bytes, close: bool = False, pause: float = 0.0) -> Speak:
    """Write these pieces one after another, and then hang up if told to."""

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        if close:
            raise ConnectionResetError

    return speak


async def everything(response: Response) -> bytes:
    parts = []
    while data := await response.read():
        parts.append(data)
    return b"".join(parts)


async def fetch(server: Server, pool: HttpPool, body: bytes = b"ask") -> tuple[int, bytes]:
    response = await pool.post(server.url, {"x-a": "b"}, body)
    try:
        return response.status, await everything(response)
    finally:
        response.close()


@pytest.mark.parametrize(("answer", "connections"), [(PLAIN, 1), (CHUNKED, 1), (UNTIL_CLOSE, 3)])
async def test_an_answer_is_the_same_however_it_is_split(answer: bytes, connections: int, rng: random.Random) -> None:
    close = answer is UNTIL_CLOSE
    cuts = sorted(rng.sample(range(1, len(answer)), 6))
    some = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    splits = [[answer], [bytes([byte]) for byte in answer], some]
    async with serving(says()) as (server, pool):
        for pieces in splits:
            server.speak = says(*pieces, close=close)
            assert await fetch(server, pool) == (200, b"hello")
        assert server.connections == connections
        head, _, body = server.requests[-1].partition(b"\r\n\r\n")
        assert (head.split(b"\r\n")[0], body) == (b"POST /v1/x HTTP/1.1", b"ask")
        assert b"x-a: b" in head.split(b"\r\n")


async def test_headers_are_read_in_any_case_and_trailers_are_none() -> None:
    async with serving(says(CHUNKED.replace(b"transfer-", b"RETRY-AFTER: 7\r\nretry-after: 8\r\nTransfer-"))) as (
        server,
        pool,
    ):
        response = await pool.post(server.url, {}, b"")
        await everything(response)
        assert response.headers == {b"retry-after": b"7", b"transfer-encoding": b"chunked"}
        response.close()
        server.speak = says(PLAIN)
        response = await pool.post(server.url, {}, b"")
        assert response.content_type == b"application/json"
        response.close()


async def test_interim_answers_are_passed_over_within_bounds() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    async with serving(says(interim + PLAIN)) as (server, pool):
        assert await fetch(server, pool) == (200, b"hello")
        server.speak = says(interim * 20 + PLAIN)
        with pytest.raises(ProtocolError):
            await fetch(server, pool)
        server.speak = says(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")
        with pytest.raises(ProtocolError):
            await fetch(server, pool)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        OK + b"content-length: five\r\n\r\nhello",
        OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
        OK + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"x: " + b"y" * (MAX_HEAD_BYTES + 65536),
        OK + b"x: y\r\n" * (MAX_HEAD_BYTES // 3),
        OK + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nt: " + b"y" * (2 * MAX_HEAD_BYTES + 65536),
    ],
)
async def test_what_is_no_http_or_has_no_end_is_refused(answer: bytes) -> None:
    async with serving(says(answer)) as (server, pool):
        with pytest.raises(ProtocolError):
            await fetch(server, pool)


@pytest.mark.parametrize("answer", [b"", OK, PLAIN[:-1], CHUNKED[:-2], CHUNKED[:-30]])
async def test_a_connection_that_ends_in_the_middle_is_lost_after_what_came(answer: bytes) -> None:
    async with serving(says(answer, close=True)) as (server, pool):
        with pytest.raises(LostError):
            await fetch(server, pool)
        response = None
        try:
            response = await pool.post(server.url, {}, b"")
            seen = await response.read()
            assert b"hello".startswith(seen)
            with pytest.raises(LostError):
                while await response.read():
                    pass
        except LostError:
            assert b"\r\n\r\n" not in answer or answer.endswith(b"\r\n\r\n")
        finally:
            if response is not None:
                response.close()


async def test_a_body_until_the_end_that_is_reset_is_lost() -> None:
    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UNTIL_CLOSE)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER 0: RST
        writer.transport.abort()

    async with serving(reset) as (server, pool):
        with pytest.raises(LostError):
            await fetch(server, pool)


@pytest.mark.parametrize("extra", [b"x", PLAIN, b"\r\n\r\nHTTP/1.1 500 No\r\n\r\n"])
async def test_bytes_after_the_body_belong_to_no_later_request(extra: bytes) -> None:
    async with serving(says(PLAIN + extra)) as (server, pool):
        for _ in range(3):
            assert await fetch(server, pool) == (200, b"hello")
        assert server.connections == 3


async def test_bytes_that_come_while_idle_belong_to_no_later_request() -> None:
    async with serving(says(PLAIN, PLAIN.replace(b"hello", b"wrong"), pause=0.02)) as (server, pool):
        for _ in range(3):
            assert await fetch(server, pool) == (200, b"hello")
            await asyncio.sleep(0.05)
        assert server.connections == 3


@pytest.mark.parametrize("said", [PLAIN.replace(b"Content-L", b"Connection: close\r\nContent-L"), UNTIL_CLOSE])
async def test_a_connection_that_is_to_be_closed_is_not_used_again(said: bytes) -> None:
    async with serving(says(said, close=True)) as (server, pool):
        for _ in range(2):
            assert await fetch(server, pool) == (200, b"hello")
        assert server.connections == 2


async def test_a_connection_that_was_closed_while_idle_is_not_used() -> None:
    async with serving(says(PLAIN, close=True)) as (server, pool):
        for _ in range(3):
            assert await fetch(server, pool) == (200, b"hello")
            await asyncio.sleep(0.02)
        assert server.connections == 3


async def test_a_connection_that_closes_as_it_is_used_again_is_lost_not_repeated() -> None:
    async def once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            raise ConnectionResetError
        writer.write(PLAIN)

    async with serving(once) as (server, pool):
        assert await fetch(server, pool) == (200, b"hello")
        with pytest.raises(LostError):
            await fetch(server, pool)
        assert (len(server.requests), server.connections) == (2, 1)


@pytest.mark.parametrize("said", [b"", OK[:9], OK + b"content-length: 5\r\n\r\nhel"])
async def test_silence_is_given_up(said: bytes) -> None:
    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await asyncio.Event().wait()

    async with serving(hang, silence_s=0.1) as (server, pool):
        with pytest.raises(SilentError):
            await fetch(server, pool)


async def test_a_slow_answer_that_goes_on_is_no_silence() -> None:
    async with serving(says(*[bytes([byte]) for byte in PLAIN], pause=0.01), silence_s=0.4) as (server, pool):
        assert await fetch(server, pool) == (200, b"hello")


async def test_who_does_not_read_stops_the_writer_and_is_no_silence() -> None:
    size, sent = 64 * 1024 * 1024, 0

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    async with serving(pour, silence_s=0.2) as (server, pool):
        response = await pool.post(server.url, {}, b"")
        await asyncio.sleep(0.5)
        assert sent < size / 2
        assert response._held < HELD_BYTES + 1024 * 1024
        assert len(await everything(response)) == size
        response.close()
        server.speak = says(PLAIN)
        assert await fetch(server, pool) == (200, b"hello")
        assert server.connections == 1


async def test_a_large_body_arrives_and_an_early_answer_to_one_is_heard() -> None:
    body = random.Random(1).randbytes(3_000_000)
    async with serving(says(PLAIN)) as (server, pool):
        assert await fetch(server, pool, body) == (200, b"hello")
        assert server.requests[0].endswith(body)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PLAIN.replace(b"200 OK", b"413 No"))
        await reader.read(10)
        await heard.wait()
        writer.close()
        gone.set()

    heard, gone = asyncio.Event(), asyncio.Event()
    refusing = await asyncio.start_server(refuse, "127.0.0.1", 0)
    pool = HttpPool(5.0, ADDRESSES)
    url = f"http://127.0.0.1:{refusing.sockets[0].getsockname()[1]}/"
    response = await pool.post(url, {}, bytes(50_000_000))
    assert (response.status, await everything(response)) == (413, b"hello")
    response.close()
    assert not pool._idle
    pool.close()
    refusing.close()
    heard.set()
    async with asyncio.timeout(5):
        await gone.wait()


async def test_f12_a_caller_that_leaves_leaves_no_connection_behind(rng: random.Random) -> None:
    pieces = [PLAIN[:10], PLAIN[10:60], PLAIN[60:]]
    async with serving(says(*pieces, pause=0.002)) as (server, pool):
        for _ in range(60):
            task = asyncio.create_task(fetch(server, pool))
            await asyncio.sleep(rng.random() * 0.012)
            task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            assert outcome == (200, b"hello") or isinstance(outcome, asyncio.CancelledError)
            assert pool.in_use == 0
        assert await fetch(server, pool) == (200, b"hello")


async def test_nobody_there_is_unreachable_and_a_header_of_two_lines_is_refused() -> None:
    async with serving(says(PLAIN)) as (server, pool):
        with pytest.raises(UnreachableError):
            await pool.post(f"http://127.0.0.1:{free_port()}/", {}, b"")
        for value in ("a\r\nb: c", "a\nb", "a\0"):
            with pytest.raises(ValueError, match="one line"):
                await pool.post(server.url, {"x": value}, b"")
        assert not server.requests


async def test_many_at_once_each_get_their_own() -> None:
    async def echo(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.001)
        said = server.requests[-1]
        body = said.partition(b"\r\n\r\n")[2]
        writer.write(OK + b"content-length: %d\r\n\r\n" % len(body) + body)

    async def one(n: int) -> None:
        try:
            status, said = await fetch(server, pool, b"%d" % n)
        except HttpError as error:
            raise AssertionError from error
        assert status == 200
        assert said.isdigit()

    async with serving(echo) as (server, pool):
        for _ in range(5):
            await asyncio.gather(*(one(n) for n in range(40)))
        assert server.connections <= 40
