"""Sums of what gateways and engines counted, for one replica, tenant, span or everything.

Layer: service. Pure. Reads of a row what pages show and skips the rest; the gateways' and the engines' counts stay
apart. It never divides: rates and ratios are `figures`' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dataplane.protocol import GatewayCounters, Histogram


# The parts of windows that pages show; decoding skips the rest (tenants, experts, collectives, gaps).
class _ServicePart(msgspec.Struct, frozen=True, kw_only=True):
    ttft: Histogram | None = None
    tpot: Histogram | None = None


class _MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    prefix_queries: int = 0
    prefix_hits: int = 0


class EngineCounters(msgspec.Struct, frozen=True, kw_only=True):
    service: _ServicePart = _ServicePart()
    memory: _MemoryPart = _MemoryPart()


class EngineWindow(msgspec.Struct, frozen=True, kw_only=True):
    counters: EngineCounters = EngineCounters()
    gauge_sums: dict[str, float] = {}
    gauge_samples: int = 0


decode_engine = msgspec.msgpack.Decoder(EngineWindow).decode
decode_gateway = msgspec.msgpack.Decoder(GatewayCounters).decode


class Scope:
    """Everything counted of one replica, one tenant, one span or all.

    Adds like `Tally.merge`, by hand: a page of a large fleet adds tens of thousands of rows, and the general merge
    copies every dictionary each time.
    """

    __slots__ = (
        "accepted",
        "cached_tokens",
        "cancelled",
        "e2e",
        "engine_tpot",
        "engine_ttft",
        "failed",
        "finished",
        "forged",
        "output_tokens",
        "prefix_hits",
        "prefix_queries",
        "prompt_tokens",
        "refused",
        "tpot",
        "ttft",
        "ttft_visible",
    )

    def __init__(self) -> None:
        self.accepted = self.cancelled = self.forged = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.prefix_queries = self.prefix_hits = 0
        self.finished: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.ttft, self.ttft_visible, self.tpot, self.e2e = Histogram(), Histogram(), Histogram(), Histogram()
        self.engine_ttft, self.engine_tpot = Histogram(), Histogram()

    def add_gateway(self, counters: GatewayCounters | Scope) -> None:
        """Add what gateways counted."""
        self.accepted += counters.accepted
        self.cancelled += counters.cancelled
        self.forged += counters.forged
        self.prompt_tokens += counters.prompt_tokens
        self.cached_tokens += counters.cached_tokens
        self.output_tokens += counters.output_tokens
        _add_counts(self.finished, counters.finished)
        _add_counts(self.refused, counters.refused)
        _add_counts(self.failed, counters.failed)
        _add_histogram(self.ttft, counters.ttft)
        _add_histogram(self.ttft_visible, counters.ttft_visible)
        _add_histogram(self.tpot, counters.tpot)
        _add_histogram(self.e2e, counters.e2e)

    def add_engine(self, counters: EngineCounters) -> None:
        """Add what engines counted."""
        self.prefix_queries += counters.memory.prefix_queries
        self.prefix_hits += counters.memory.prefix_hits
        _add_histogram(self.engine_ttft, counters.service.ttft)
        _add_histogram(self.engine_tpot, counters.service.tpot)

    def add(self, other: Scope) -> None:
        """Add both sides of another scope."""
        self.add_gateway(other)
        self.prefix_queries += other.prefix_queries
        self.prefix_hits += other.prefix_hits
        _add_histogram(self.engine_ttft, other.engine_ttft)
        _add_histogram(self.engine_tpot, other.engine_tpot)


def _add_counts(mine: dict[Any, int], theirs: Mapping[Any, int]) -> None:
    for key, number in theirs.items():
        mine[key] = mine.get(key, 0) + number


def _add_histogram(mine: Histogram, theirs: Histogram | None) -> None:
    if theirs is not None and theirs.count:
        mine.count += theirs.count
        mine.total += theirs.total
        mine.zero += theirs.zero
        mine.over += theirs.over
        _add_counts(mine.buckets, theirs.buckets)
