"""A fake engine in a process of its own: `python -m controlplane.lab.bench.engine`.

Layer: service. Raw HTTP/1.1 on uvloop, as fast as Python allows, so that what stands in front of it is the bound.
Streams write each token as a write of its own. It registers with a control plane as a replica does, and keeps usage
until acknowledged. It computes nothing and must never be mistaken for an engine: it listens on loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import click
import msgspec
import uvloop

from controlplane.lab.bench import wire
from controlplane.lab.bench.engine_report import EngineReporter, Identity, UsageBook
from controlplane.lab.bench.wire import LAST_CHUNK, STREAM_HEAD, Answers, Ask, Timing

HOST = "127.0.0.1"
MAX_HEAD = 16 * 1024
MAX_BODY = 8 * 1024 * 1024
MAX_TOKENS = 100_000
RECEIPT = struct.Struct("<I")
"""A client's word that it has a stream's last token, by UDP: the streams' numbers, little-endian, one after another."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ATTEMPT = re.compile(rb"\r\nx-tidegate-attempt: *([^\r]+)", re.IGNORECASE)


class Engine:
    """What all connections share."""

    def __init__(self, answers: Answers, usage: UsageBook | None = None) -> None:
        self.answers = answers
        self.usage = usage
        self.turns = Turns()
        self.waiting: dict[int, Stream] = {}
        """Streams that wait for their client's receipts, by number."""


class Connection(asyncio.Protocol):
    """One client's connection: reads requests one after another, answers each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held = b""
        self._busy = False
        self._transport: asyncio.Transport | None = None
        self._stream: Stream | None = None
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        if self._stream is not None:
            self._stream.leave()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self._held = self._held + data if self._held else data
        self._next()

    def write(self, data: bytes) -> bool:
        """False when the client has gone."""
        if self._transport is None:
            return False
        self._transport.write(data)
        return True

    def answered(self) -> None:
        """The answer is complete: the next request may be read."""
        self._busy, self._stream = False, None
        if self._held:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        while self._held and not self._busy:
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                if len(self._held) > MAX_HEAD:
                    self._close()
                return
            head = self._held[: end + 2]
            found = _LENGTH.search(head)
            length = int(found[1]) if found else 0
            if length > MAX_BODY:
                self._close()
                return
            if len(self._held) < end + 4 + length:
                return
            body = self._held[end + 4 : end + 4 + length]
            self._held = self._held[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET /healthz "):
            self.write(wire.response(200, b'{"status":"ok"}'))
            return
        if not head.startswith(b"POST /v1/chat/completions "):
            self.write(wire.error(404, "The fake engine serves POST /v1/chat/completions only."))
            return
        try:
            ask = wire.read_ask(body)
            pace = (ask.metadata or wire.Pace()).read()
        except (msgspec.DecodeError, ValueError) as problem:
            self.write(wire.error(400, f"The body cannot be read: {problem}"))
            return
        self._busy = True
        work = self._work(ask, pace, head)
        if pace.first_s:
            asyncio.get_running_loop().call_later(pace.first_s, work)
        else:
            work()

    def _work(self, ask: Ask, pace: Timing, head: bytes) -> Callable[[], None]:
        """What answers `ask`, to be called when it is time."""
        tokens = min(max(1, ask.max_tokens), MAX_TOKENS)
        begun = time.time()

        def over() -> None:
            self._note(head, tokens, begun=begun)
            self.answered()

        if not ask.stream:
            return lambda: over() if self.write(self._engine.answers.whole(tokens)) else None
        usage = ask.stream_options is not None and ask.stream_options.include_usage
        left = partial(self._note, head, begun=begun)
        self._stream = stream = Stream(self, self._engine, tokens, usage=usage, on_over=over, on_left=left)
        return lambda: stream.begin(pace)

    def _note(self, head: bytes, tokens: int, *, begun: float) -> None:
        book = self._engine.usage
        if book is not None and (attempt := _ATTEMPT.search(head)):
            book.add(head, attempt[1].decode("latin-1"), wire.PROMPT_TOKENS, tokens, begun)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Stream:
    """One streamed answer; `step` writes one token."""

    __slots__ = (
        "_connection", "_engine", "_left", "_number", "_on_left", "_on_over", "_over", "_tokens", "_usage", "_word",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        tokens: int,
        *,
        usage: bool,
        on_over: Callable[[], None],
        on_left: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._engine = engine
        self._tokens = self._left = tokens
        self._usage = usage
        self._on_over = on_over
        self._on_left = on_left
        self._word = 0
        self._over = False
        self._number = -1

    def begin(self, pace: Timing) -> None:
        """Send head, role and first token; the rest as `pace` says."""
        answers = self._engine.answers
        self._connection.write(STREAM_HEAD + answers.opening)
        if pace.stream is not None:
            self._number = pace.stream
            self._engine.waiting[self._number] = self
            self.step()
        elif pace.token_s:
            self._paced(pace.token_s)
        else:
            self._engine.turns.join(self)

    def step(self) -> bool:
        """Write a token, after the last one the end; False when the stream is over."""
        if self._over:
            return False
        if self._connection.paused:
            return True
        answers = self._engine.answers
        if self._left:
            self._left -= 1
            token = answers.tokens[self._word]
            self._word = (self._word + 1) % len(answers.tokens)
            if not self._connection.write(token):
                self.leave()
            return not self._over
        self._end()
        return False

    def leave(self) -> None:
        """The client has gone; what it was sent is used."""
        if not self._over:
            self._on_left(self._tokens - self._left)
        self.abandon()

    def abandon(self) -> None:
        """Nothing more is sent."""
        self._over = True
        self._engine.waiting.pop(self._number, None)

    def _end(self) -> None:
        answers = self._engine.answers
        usage = answers.usage(self._tokens) if self._usage else b""
        self._connection.write(answers.closing + usage + answers.done + LAST_CHUNK)
        self.abandon()
        self._on_over()

    def _paced(self, gap: float) -> None:
        if self.step():
            asyncio.get_running_loop().call_later(gap, self._paced, gap)


class Turns:
    """Unpaced streams: one token of each in every turn of the loop, as a batch's step would give them."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []

    def join(self, stream: Stream) -> None:
        self._streams.append(stream)
        if len(self._streams) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._streams, streams = [], self._streams
        self._streams = [stream for stream in streams if stream.step()] + self._streams
        if self._streams:
            asyncio.get_running_loop().call_soon(self._turn)


class Receipts(asyncio.DatagramProtocol):
    """Clients' receipts: the next token of each stream that is named."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def datagram_received(self, data: bytes, _: object) -> None:
        waiting = self._engine.waiting
        for (number,) in RECEIPT.iter_unpack(data[: len(data) // RECEIPT.size * RECEIPT.size]):
            stream = waiting.get(number)
            if stream is not None:
                stream.step()


async def serve(engine: Engine, port: int, reporter: EngineReporter | None) -> None:
    """Serve until cancelled, on TCP for requests and on UDP for receipts; a line on standard output says from when."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), HOST, port, backlog=4096)
    transport, _ = await loop.create_datagram_endpoint(lambda: Receipts(engine), local_addr=(HOST, port))
    gc.freeze()
    click.echo(f"listening on {HOST}:{port}")
    try:
        if reporter is None:
            await asyncio.Event().wait()
        else:
            await reporter.run()
    finally:
        transport.close()
        server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await server.wait_closed()


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), required=True)
@click.option("--model", required=True, help="The model's name in answers.")
@click.option("--pool", default="", help="Register as a replica of this pool.")
@click.option("--control-url", default="", help="Control plane to register with.")
def main(port: int, model: str, pool: str, control_url: str) -> None:
    """Serve made-up answers on loopback until SIGTERM; TIDEGATE_INTERNAL_TOKEN opens the control plane."""
    usage = reporter = None
    if control_url:
        who = Identity(replica=f"{pool}-bench", pool=pool, model=model, url=f"http://{HOST}:{port}")
        usage = UsageBook(who)
        reporter = EngineReporter(who, usage, control_url, os.environ.get("TIDEGATE_INTERNAL_TOKEN", ""))
    uvloop.run(serve(Engine(Answers(model), usage), port, reporter))


if __name__ == "__main__":
    main()
