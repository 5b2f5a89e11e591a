"""How many KV blocks an admission takes, and how many it must leave to others.

Layer: scheduling. Pure. On demand, a request takes the blocks its tokens need now and the watermark lets those who run
grow (PagedAttention); with reserve-max it takes all it may ever need, so that nobody is preempted (Orca's slots,
TensorRT-LLM's GUARANTEED_NO_EVICT). Which request that is, it does not say.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dataplane.request import Request, RequestError
from dataplane.scheduling.config import Capacity, SchedulerConfig

Reserve = Callable[[Request], int]
"""Tokens, prompt and output together, for which a request's table must have room now; it may grow with the request."""


def reserve_max(request: Request) -> int:
    """Room for all the tokens whose KV the request may ever hold."""
    return request.most_tokens


class Room:
    """What to ask of the pool for each request. `usable` blocks of `block_size` tokens can be held."""

    def __init__(self, config: SchedulerConfig, usable: int, block_size: int, reserve: Reserve | None = None) -> None:
        self._block_size, self._usable = block_size, usable
        self._watermark = math.ceil(config.watermark * usable)
        self._reserve = reserve_max if reserve is None and config.capacity is Capacity.RESERVE_MAX else reserve
        self.reserves = self._reserve is not None
        self.grows = self.reserves and self._reserve is not reserve_max
        """Whether a table needs more room as its request gets on, beyond that for its tokens."""
        self.promised: dict[str, int] = {}
        """Blocks that are kept free, by the request they are for."""

    def check(self, request: Request) -> None:
        """Raises RequestError when a request, with its forks where they are reserved for, is larger than the pool."""
        size, needed = self._block_size, request.most_tokens
        if self._reserve is not None and request.forks:
            blocks = -(-needed // size)
            needed = (blocks + (request.seats - 1) * (blocks - request.prompt_len // size)) * size
        if needed > self._usable * size:
            raise RequestError(
                f"the KV pool holds {self._usable * size} tokens; the request may need {needed}",
                "context_length_exceeded",
                "max_tokens",
            )

    def tokens(self, request: Request) -> int:
        """For `KVManager.allocate(reserve=…)`; never more than the pool, or the request would not start."""
        return min(self._reserve(request), self._usable * self._block_size) if self._reserve is not None else 0

    def keep_free(self, *, alone: bool, forks: int = 0) -> int:
        """Blocks that an admission must leave free: those promised, and the watermark unless nobody runs.

        `forks` are blocks that the admitted request's own forks will need.
        """
        return (0 if alone else self._watermark) + sum(self.promised.values()) + forks

    def forks(self, request: Request) -> int:
        """Blocks that the forks of a request will take beside the full blocks of its prompt, if they are reserved."""
        if self._reserve is None or not request.forks:
            return 0
        own = -(-max(self.tokens(request), request.prompt_len) // self._block_size)
        return (request.seats - 1) * (own - request.prompt_len // self._block_size)

    def promise(self, request: Request, blocks: int) -> None:
        """Keep `blocks` free for a request until it is kept or forgotten."""
        if blocks:
            self.promised[request.request_id] = blocks

    def keep(self, request: Request) -> None:
        """The request has what it was promised, or needs it no more."""
        self.promised.pop(request.request_id, None)
