"""A heap of named items that may be re-keyed, and removed from its middle.

Layer: scheduling. Pure. The building block of every queue order; it knows nothing of requests.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Key = tuple[float, ...]
Entry = tuple[Key, int, str, Item]

SPARE = 16


class LazyHeap(Generic[Item]):
    """The lowest key first; equal keys by insertion. Dead entries stay until they reach the top or outnumber the rest.

    `first` is O(1), `put` and `remove` are O(log n) amortised, whatever was put and removed before. Invariant: the
    top entry is live.
    """

    def __init__(self) -> None:
        self._entries: list[Entry[Item]] = []
        self._live: dict[str, Entry[Item]] = {}
        self._serial = itertools.count()
        self._changes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def __iter__(self) -> Iterator[Item]:
        """In order, O(log n) an item. Raises RuntimeError when the heap changed meanwhile."""
        entries, changes = self._entries, self._changes
        # A heap is a tree whose children are no smaller than their parent: the next entry is always one of `edge`.
        edge = [(entries[0], 0)] if entries else []
        while edge:
            entry, index = heapq.heappop(edge)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(entries):
                    heapq.heappush(edge, (entries[child], child))
            if self._live.get(entry[2]) is entry:
                yield entry[3]
                if self._changes != changes:
                    raise RuntimeError("the queue changed while it was walked through")

    def put(self, name: str, key: Key, item: Item) -> None:
        """Add an item, or give the one of this name another key."""
        entry = (key, next(self._serial), name, item)
        self._live[name] = entry
        heapq.heappush(self._entries, entry)
        self._tidy()

    def first(self) -> Item | None:
        """The item of the lowest key."""
        return self._entries[0][3] if self._entries else None

    def get(self, name: str) -> Item:
        """The item of this name. Raises KeyError when there is none."""
        return self._live[name][3]

    def key(self, name: str) -> Key:
        """The key of this name. Raises KeyError when there is none."""
        return self._live[name][0]

    def remove(self, name: str) -> Item:
        """Take an item out. Raises KeyError when there is none of this name."""
        item = self._live.pop(name)[3]
        self._tidy()
        return item

    def _tidy(self) -> None:
        self._changes += 1
        if len(self._entries) > 2 * len(self._live) + SPARE:
            self._entries = list(self._live.values())
            heapq.heapify(self._entries)
        while self._entries and self._live.get(self._entries[0][2]) is not self._entries[0]:
            heapq.heappop(self._entries)
