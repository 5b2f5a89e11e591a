"""Order by what the prefix cache holds: hits go first, in proportion, so that misses never starve.

Layer: scheduling. Pure. Source: Srivatsa et al., Preble, section 3.4 (local scheduler). A request belongs to the group
of its hit ratio; group g of G (1 holds the misses) gets g shares of the admissions. Inside a group it is first come,
first served. The prefix cache is somebody else's: this asks for a ratio and keeps none of the blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from dataplane.request import Request
from dataplane.scheduling.heap import LazyHeap

GROUPS = 10
LOOKS = 4


class CacheOrder:
    """Groups by hit ratio, served by stride scheduling (Waldspurger and Weihl).

    A group waits 1/g of virtual time from one admission to the next, and as long before its first. So of a group that
    has somebody waiting, every G(G+1)/2g + G admissions hold one at the least, whatever arrives. In a step that looks
    (`peek` with a later `now`) at most `LOOKS` requests are rated anew, each in its turn. A rating only rises: one
    that followed the cache down as well could be moved for ever and never served.
    """

    def __init__(self, hit_ratio: Callable[[Request], float], *, groups: int = GROUPS, looks: int = LOOKS) -> None:
        self._hit_ratio = hit_ratio
        self._looks = looks
        self._groups: list[LazyHeap[Request]] = [LazyHeap() for _ in range(groups)]
        # Virtual time in units that every stride divides, so that it stays exact however long it runs.
        unit = math.lcm(*range(1, groups + 1))
        self._strides = [unit // (index + 1) for index in range(groups)]
        self._turns = [0] * groups
        self._time = 0
        self._rated: OrderedDict[str, int] = OrderedDict()  # the group of each, those rated longest ago first
        self._arrivals: dict[str, int] = {}
        self._arrived = 0
        self._looked = 0.0

    @property
    def settled(self) -> bool:
        return not self._rated

    def __len__(self) -> int:
        return len(self._rated)

    def __iter__(self) -> Iterator[Request]:
        """In order of service, with the ratings of now."""
        turns = {index: self._turns[index] for index, group in enumerate(self._groups) if group}
        walks = {index: iter(self._groups[index]) for index in turns}
        left = {index: len(self._groups[index]) for index in turns}
        while turns:
            index = min(turns, key=lambda index: (turns[index], -index))
            yield next(walks[index])
            turns[index] += self._strides[index]
            left[index] -= 1
            if not left[index]:
                del turns[index]

    def push(self, request: Request) -> None:
        self._arrived += 1
        self._arrivals[request.request_id] = self._arrived
        self._enter(request, self._rate(request))

    def peek(self, now: float = 0.0) -> Request | None:
        if now > self._looked:
            self._looked = now
            self._look_again()
        index = self._next()
        return None if index is None else self._groups[index].first()

    def pop(self) -> Request:
        index = self._next()
        assert index is not None
        request = self._groups[index].first()
        assert request is not None
        self._time = self._turns[index]
        self._turns[index] += self._strides[index]
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        self._groups[self._rated.pop(request.request_id)].remove(request.request_id)
        del self._arrivals[request.request_id]

    def served(self, request: Request, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        pass

    def finished(self, request: Request) -> None:
        pass

    def _next(self) -> int | None:
        """The group whose turn comes first; of equals, the one with more hits."""
        waiting = [index for index, group in enumerate(self._groups) if group]
        return min(waiting, key=lambda index: (self._turns[index], -index), default=None)

    def _rate(self, request: Request) -> int:
        return min(int(self._hit_ratio(request) * len(self._groups)), len(self._groups) - 1)

    def _enter(self, request: Request, index: int) -> None:
        group = self._groups[index]
        if not group:
            self._turns[index] = self._time + self._strides[index]
        group.put(request.request_id, (request.queued, self._arrivals[request.request_id]), request)
        self._rated[request.request_id] = index

    def _look_again(self) -> None:
        """Rate those anew whose rating is oldest: what they share may have been computed meanwhile."""
        for _ in range(min(self._looks, len(self._rated))):
            request_id, old = next(iter(self._rated.items()))
            request = self._groups[old].get(request_id)
            new = self._rate(request)
            if new > old:
                self._groups[old].remove(request_id)
                self._enter(request, new)
            self._rated.move_to_end(request_id)
