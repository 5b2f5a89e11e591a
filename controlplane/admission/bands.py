"""Priority bands, lanes, and the lines that requests wait in.

Layer: service. Pure. A line is one band of one lane. Bands go before one another, and each keeps a floor, so that none
starves; the lane of very long prompts has room of its own, so that a flood of them cannot stand before short ones.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

LONG_SHARE = 0.25
"""Of a pool's replicas, slots and KV tokens: what the long lane may hold at once, but always one request."""


class Band(enum.IntEnum):
    """Lower goes first."""

    URGENT = 0
    STANDARD = 1
    LOW = 2
    BATCH = 3


class Lane(enum.IntEnum):
    """`LONG` is for prompts of which much must be computed; what the cache holds does not make a prompt long."""

    SHORT = 0
    LONG = 1


LINES = len(Band) * len(Lane)
FLOORS: tuple[float, ...] = (0.0, 0.10, 0.05, 0.05)
"""By band: its share of the KV tokens dispatched in its lane while it waits, whatever waits before it."""

_FIRST_BATCH_PRIORITY = 50


def band_of(priority: int) -> Band:
    """The band of a tenant's or key's priority (−100 to 100, lower goes first): below 0 urgent, 0 standard, from 50
    on batch.
    """
    if priority < 0:
        return Band.URGENT
    if priority == 0:
        return Band.STANDARD
    return Band.LOW if priority < _FIRST_BATCH_PRIORITY else Band.BATCH


def lane_of(uncached: int, long_prompt: int) -> Lane:
    """The lane of a prompt of which `uncached` tokens must be computed; from `long_prompt` on it is long."""
    return Lane.LONG if uncached >= long_prompt else Lane.SHORT


def line_of(lane: Lane, band: Band) -> int:
    """The number of the line, 0 to LINES − 1: short before long, within each by band."""
    return lane * len(Band) + band


def lane_of_line(line: int) -> Lane:
    return Lane(line // len(Band))


def lane_replicas(lane: Lane, replicas: int, with_long: Collection[int]) -> list[int]:
    """Which replicas (by place in a stable order) may take a request of `lane`; those `with_long` hold long prompts.

    Long prompts keep to the first LONG_SHARE of the replicas, at least one, and short ones go where none is. Only when
    every replica has one do the two meet: then the engine's limit on a prompt's tokens in one step divides it.
    """
    if lane is Lane.LONG:
        return list(range(min(replicas, max(1, int(replicas * LONG_SHARE)))))
    return [place for place in range(replicas) if place not in with_long] or list(range(replicas))
