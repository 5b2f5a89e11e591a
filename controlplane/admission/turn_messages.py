"""What gateways tell the queue that they share, and what it answers.

Layer: scheduling. Plain data, encoded as arrays: `lua_dispatch/turn.lua` reads and writes them by place.
"""

from __future__ import annotations

import msgspec

from controlplane.admission.bands import FLOORS


class Rules(msgspec.Struct, frozen=True, array_like=True):
    """What the pool may hold, as the gateway that takes the turn knows it. Tokens are KV tokens.

    The long lane holds `long_slots` and `long_tokens` at most; while it waits, `long_reserve` tokens less what it holds
    are kept from the short lane, so that its turn comes. A lane that holds nothing may always start one request.
    """

    slots: int
    tokens: int
    long_slots: int
    long_tokens: int
    long_reserve: int
    floors: tuple[float, ...] = FLOORS


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """A request that wants dispatching. `tokens` is its prompt and its longest answer; `charge` its input's, divided by
    the tenant's weight, due at dispatch. `held` marks one that runs already and is made known again.
    """

    request_id: str
    line: int
    tenant: str
    deadline_ms: int
    tokens: int
    charge: float
    held: bool = False


class Service(msgspec.Struct, frozen=True, array_like=True):
    """Output that a tenant got: its charge, divided by the tenant's weight."""

    line: int
    tenant: str
    charge: float


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One gateway's news. `gateway` names one boot of it; its pokes go to what stands before a `#`. `number` grows with
    each message, and a repeat of the same one is harmless. `fresh` says that the queue need not know the gateway yet.
    `ended` are requests that finished or gave up; `seen` are dispatches that were heard of.
    """

    gateway: str
    number: int
    fresh: bool
    rules: Rules
    arrivals: tuple[Arrival, ...] = ()
    served: tuple[Service, ...] = ()
    ended: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """A request may go to a replica. `tag` is its tenant's virtual service at dispatch: the engine's second key."""

    request_id: str
    tag: float


class TurnAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`lost` says that the queue does not know this gateway (any more): nothing was taken, everything must be told
    again. Dispatches are repeated until they were seen. `refused` found the queue full; `poked` are other gateways
    that got a dispatch. `waiting`, `slots` and `tokens` are of the whole pool afterwards, `long` the slots of the long
    lane among them, `gateways` how many share it. `reaping` says that requests of dead gateways are left to clear:
    whoever hears it takes the next turn at once, so that all are gone after as many turns as REAPED goes into them.
    """

    sequence: int
    at: float
    lost: bool
    grants: tuple[Grant, ...] = ()
    refused: tuple[str, ...] = ()
    poked: tuple[str, ...] = ()
    waiting: int = 0
    slots: int = 0
    tokens: int = 0
    gateways: int = 0
    long: int = 0
    reaping: bool = False
