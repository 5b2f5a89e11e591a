"""The ZMQ link between a replica's HTTP front and its engine core.

Layer: service. Owns the two sockets, their limits and the framing: one msgpack message per frame, each with
the core's boot epoch; a frame of another epoch is dropped. It never looks into requests or outputs.

The front binds a ROUTER on a unix socket in a private folder; the core connects a DEALER whose identity is
its epoch, so a message for a core that is gone raises instead of waiting for the next one.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from socket import socketpair
from types import TracebackType
from typing import Self, cast

import msgspec
import zmq
import zmq.asyncio

from dataplane.protocol import CoreMessage, FrontMessage, encode

TO_CORE_HIGH_WATER = 2048
"""Frames the front may have queued towards the core: adds and aborts."""
TO_FRONT_HIGH_WATER = 1024
"""Step frames the core may have queued towards the front; at the limit the core waits."""
LONGEST_SOCKET_PATH = 100
LINGER_MS = 1000

_decode_core = msgspec.msgpack.Decoder(CoreMessage).decode
_decode_front = msgspec.msgpack.Decoder(FrontMessage).decode


class CoreUnreachableError(Exception):
    """No core of this epoch is connected."""


class CoreBusyError(Exception):
    """The core has not taken its queued messages; the high-water mark is reached."""


def identity_of(epoch: int) -> bytes:
    """The ZMQ routing id of the core with this boot epoch."""
    return b"core-%d" % epoch


class UnreadableFrameError(Exception):
    """A core sent what is no message of it; `identity` is the core's."""

    def __init__(self, identity: bytes, reason: str) -> None:
        super().__init__(reason)
        self.identity = identity


class FrontEndpoint:
    """The front's side: created once, outlives every core."""

    def __init__(self, folder: Path | None = None) -> None:
        """The socket lies in `folder`, which is emptied and belongs to this endpoint, when its path is short enough
        for a unix socket; otherwise in a temporary one."""
        self._folder = _private_folder(folder)
        self.address = f"ipc://{self._folder}/core"
        self._context: zmq.asyncio.Context = zmq.asyncio.Context(io_threads=1)
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, TO_CORE_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, TO_FRONT_HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self.address)
        self._socket = socket

    def send(self, epoch: int, message: FrontMessage) -> None:
        """Queue one message for the core of `epoch` without waiting."""
        frames = [identity_of(epoch), encode(message)]
        # With NOBLOCK the future is complete on return: the send either happened or failed.
        sent = cast("asyncio.Future[None]", self._socket.send_multipart(frames, flags=zmq.NOBLOCK))
        try:
            sent.result()
        except zmq.Again:
            raise CoreBusyError from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise CoreUnreachableError from None
            raise

    async def receive(self) -> tuple[bytes, CoreMessage]:
        """The next message and the identity of the core that sent it. Raises UnreadableFrameError."""
        identity, payload = await self._socket.recv_multipart()
        try:
            return identity, _decode_core(payload)
        except msgspec.DecodeError as error:
            raise UnreadableFrameError(identity, str(error)) from None

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


class CoreEndpoint:
    """The core's side. Synchronous: the step loop owns the thread."""

    def __init__(self, address: str, epoch: int) -> None:
        self.epoch = epoch
        self.dropped = 0
        self._context = zmq.Context(io_threads=1)
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, identity_of(epoch))
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, TO_FRONT_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, TO_CORE_HIGH_WATER)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.connect(address)
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._woken, self._waker = socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self.watch(self._woken.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()
        self._woken.close()
        self._waker.close()

    def watch(self, descriptor: int) -> None:
        """Let `wait` also return when this file descriptor can be read (a signal's wake-up pipe)."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wake(self) -> None:
        """End a `wait`, or the next one if none is under way. Any thread may call it, also after the link is closed."""
        with suppress(OSError):  # full: it is awake already
            self._waker.send(b"\0")

    def wait(self, timeout_s: float = math.inf) -> None:
        """Sleep in the kernel until a message or a signal arrives, `wake` is called, or `timeout_s` have passed."""
        self._poller.poll(None if math.isinf(timeout_s) else math.ceil(1000 * timeout_s))
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def send(self, message: CoreMessage) -> None:
        """Send one frame; waits while the front is behind by `TO_FRONT_HIGH_WATER` frames."""
        self._socket.send(encode(message))

    def drain(self) -> list[FrontMessage]:
        """Every message that has arrived, in order; those of another epoch are dropped."""
        messages: list[FrontMessage] = []
        while True:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            message = _decode_front(payload)
            if message.boot_epoch == self.epoch:
                messages.append(message)
            else:
                self.dropped += 1


def _private_folder(wanted: Path | None) -> Path:
    """An empty folder with mode 0700 and a short path."""
    if wanted is not None and len(bytes(wanted)) <= LONGEST_SOCKET_PATH:
        # What a front that was killed left behind.
        shutil.rmtree(wanted, ignore_errors=True)
        wanted.mkdir(mode=0o700)
        return wanted
    folder = Path(tempfile.mkdtemp(prefix="tidegate-"))
    if len(bytes(folder)) <= LONGEST_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="tidegate-", dir="/tmp"))
