"""KV that lies elsewhere: a seam for loading it while other requests run.

Layer: scheduling. Pure. A connector says what it could load and loads it in its own time into blocks that the request
holds already; meanwhile the request is WAITING_FOR_REMOTE_KV and no step computes it. What was not loaded in the end
is computed. The blocks can be found by others only when the request runs, so nobody reads what is still on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from dataplane.request import Request

Content = TypeVar("Content")


class KVConnector(Protocol):
    """Asked by the scheduler between steps; none of its calls waits."""

    def matched(self, request: Request, have: int) -> int:
        """How many tokens it can load after the first `have`, in whole blocks and at least one short of all."""

    def start_load(self, request: Request, blocks: Sequence[int], tokens: int) -> None:
        """Begin to load `tokens` tokens into `blocks`. It must be told of by `take_loaded` once, however it ends."""

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
        self.loaded: dict[str, Request] = {}
        """Requests that wait in the queue with what was loaded for them, the latest load last."""

    def matched(self, request: Request, have: int) -> int:
        """How many tokens after `have` could be loaded."""
        if self._connector is None or not request.read_cache:
            return 0
        return self._connector.matched(request, have)

    def start(self, request: Request, blocks: Sequence[int], tokens: int) -> None:
        """Load `tokens` tokens into `blocks` of the request."""
        assert self._connector is not None
        self.loading[request.request_id] = request
        self._connector.start_load(request, blocks, tokens)

    def take(self) -> list[tuple[Request, int]]:
        """Requests whose load ended, and the tokens it brought."""
        if self._connector is None or not self.loading:
            return []
        return [(self.loading.pop(request_id), tokens) for request_id, tokens in self._connector.take_loaded().items()]


class LocalConnector(Generic[Content]):
    """KV in a dict of block hashes, in this process. `write` puts a block's content into a block of the pool.

    A load lasts until `deliver` is called, as one over a network lasts until the last byte is there.
    """

    def __init__(self, block_size: int, write: Callable[[int, Content], None]) -> None:
        self._block_size = block_size
        self._write = write
        self._store: dict[bytes, Content] = {}
        self._pending: list[tuple[str, list[tuple[int, bytes]]]] = []
        self._loaded: dict[str, int] = {}

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

    def start_load(self, request: Request, blocks: Sequence[int], tokens: int) -> None:
        count = tokens // self._block_size
        first = request.computed // self._block_size
        keys = request.block_hashes[first : first + count]
        self._pending.append((request.request_id, list(zip(blocks, keys, strict=True))))

    def deliver(self) -> None:
        """Finish every load that was begun, up to the first block that is not there any more."""
        for request_id, blocks in self._pending:
            count = 0
            for block, key in blocks:
                if key not in self._store:
                    break
                self._write(block, self._store[key])
                count += 1
            self._loaded[request_id] = count * self._block_size
        self._pending.clear()

    def take_loaded(self) -> Mapping[str, int]:
        loaded, self._loaded = self._loaded, {}
        return loaded
