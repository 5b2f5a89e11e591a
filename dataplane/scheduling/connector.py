"""KV that lies elsewhere: a seam for loading it while other requests run.

Layer: scheduling. Pure. A connector says what it could load and loads it in its own time into blocks that the request
holds already; meanwhile the request is WAITING_FOR_REMOTE_KV and no step computes it. What was not loaded in the end
is computed. The blocks can be found by others only when the request runs, so nobody reads what is still on its way.

    plan: blocks taken ──▶ executor: what they held is moved out, load begins ──▶ written ──▶ told of in a later plan
    |←────────────────── the blocks are the request's, or, once it has ended, the load's alone ──────────────────→|
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from dataplane.request import Request
from dataplane.scheduling.plan import RemoteLoad

Content = TypeVar("Content")


class KVConnector(Protocol):
    """The scheduler asks it between steps, the executor starts its loads, maybe in another thread; no call waits.

    A load may take as long as it does, but not for ever: the connector ends one whose other end is gone. Nobody else
    can tell when its blocks are written to no more.
    """

    def matched(self, request: Request, have: int) -> int:
        """How many tokens it can load after the first `have`, in whole blocks and at least one short of all."""

    def start_load(self, load: RemoteLoad) -> None:
        """Begin a load. It must be told of by `take_loaded` once, however it ends, and wakes whoever drives the core.

        It is begun even if its request has ended since it was planned. Must not raise: a load that cannot begin failed.
        """

    def take_loaded(self) -> Mapping[str, int]:
        """Loads that ended since the last call, by request: tokens loaded, from the first of those asked for on.

        Nothing is written to the blocks any more. Fewer tokens than asked for, or none, mean that the load failed.
        """


class Loads:
    """Requests between asking for remote KV and running. All of them hold blocks."""

    def __init__(self, connector: KVConnector | None) -> None:
        self._connector = connector
        self.loading: dict[str, Request] = {}
        """Loads under way, those for requests that ended among them."""
        self._loads: dict[str, RemoteLoad] = {}
        self._asked: list[RemoteLoad] = []
        self.loaded: dict[str, Request] = {}
        """Requests that wait in the queue with what was loaded for them, the latest load last."""

    def matched(self, request: Request, have: int) -> int:
        """How many tokens after `have` could be loaded."""
        if self._connector is None or not request.read_cache:
            return 0
        return self._connector.matched(request, have)

    def ask(self, request: Request, table: Sequence[int], first: int, end: int) -> None:
        """Have the blocks `first` to `end` of the request's table loaded."""
        load = RemoteLoad(request.request_id, tuple(table[first:end]), tuple(request.block_hashes[first:end]))
        self.loading[load.request_id], self._loads[load.request_id] = request, load
        self._asked.append(load)

    def take_asked(self) -> list[RemoteLoad]:
        """The loads that the executor is to begin after the moves of the step being planned."""
        asked, self._asked = self._asked, []
        return asked

    def take(self) -> list[tuple[Request, RemoteLoad, int]]:
        """Requests whose load ended, the load, and the tokens it brought."""
        if self._connector is None or not self.loading:
            return []
        return [
            (self.loading.pop(request_id), self._loads.pop(request_id), tokens)
            for request_id, tokens in self._connector.take_loaded().items()
        ]


class LocalConnector(Generic[Content]):
    """KV in a dict of block hashes, in this process. `write` puts a block's content into a block of the pool.

    A load lasts until `deliver` is called, as one over a network lasts until the last byte is there. `wake` is called
    when that was done. Loads may begin in one thread while another delivers.
    """

    def __init__(
        self, block_size: int, write: Callable[[int, Content], None], wake: Callable[[], None] = lambda: None
    ) -> None:
        self._block_size = block_size
        self._write = write
        self._wake = wake
        self._store: dict[bytes, Content] = {}
        self._pending: deque[RemoteLoad] = deque()
        self._loaded: deque[tuple[str, int]] = deque()

    def store(self, key: bytes, content: Content) -> None:
        """Keep a full block's content under its hash."""
        self._store[key] = content

    def forget(self, key: bytes) -> None:
        """Lose a content, also one whose load is under way."""
        del self._store[key]

    def matched(self, request: Request, have: int) -> int:
        first, most = have // self._block_size, (request.wanted - 1) // self._block_size
        count = 0
        for key in request.block_hashes[first:most]:
            if key not in self._store:
                break
            count += 1
        return count * self._block_size

    def start_load(self, load: RemoteLoad) -> None:
        self._pending.append(load)

    def deliver(self) -> None:
        """Finish every load that was begun, up to the first block that is not there any more."""
        while self._pending:
            load = self._pending.popleft()
            count = 0
            for block, key in zip(load.blocks, load.keys, strict=True):
                if key not in self._store:
                    break
                self._write(block, self._store[key])
                count += 1
            self._loaded.append((load.request_id, count * self._block_size))
        self._wake()

    def take_loaded(self) -> Mapping[str, int]:
        loaded = {}
        while self._loaded:
            request_id, loaded[request_id] = self._loaded.popleft()
        return loaded
