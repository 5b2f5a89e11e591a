"""How much of a pool one gateway may fill before it asks the shared queue again.

Layer: scheduling. Pure: the time is the caller's.
"""

from __future__ import annotations

import math

from controlplane.admission.turn_messages import Rules, TurnAnswer


class Room:
    """What a gateway may dispatch before it asks again: half of its part of what was free, all of it if it is alone, so
    that gateways that do not know of one another's dispatches seldom exceed what the pool holds.
    """

    __slots__ = ("_since_slots", "_since_tokens", "_slots", "_tokens", "at")

    def __init__(self) -> None:
        self.at = -math.inf
        self._slots = self._tokens = 0
        self._since_slots = self._since_tokens = 0

    def take(self, tokens: int) -> bool:
        """Room for one more request that holds so many KV tokens."""
        if self._slots < 1 or self._tokens < tokens:
            return False
        self._slots -= 1
        self._tokens -= tokens
        self._since_slots += 1
        self._since_tokens += tokens
        return True

    def give_back(self, tokens: int) -> None:
        """A request that took room is over before it was told."""
        self._slots += 1
        self._tokens += tokens
        self._since_slots = max(0, self._since_slots - 1)
        self._since_tokens = max(0, self._since_tokens - tokens)

    def asked(self) -> None:
        """A message goes out: it tells all that took room so far."""
        self._since_slots = self._since_tokens = 0

    def answered(self, rules: Rules, answer: TurnAnswer, gateways: int, now: float) -> None:
        """The queue has told what is free."""
        part = 1 if gateways == 1 else 2 * gateways
        self._slots = (rules.slots - answer.slots - self._since_slots) // part
        self._tokens = (rules.tokens - answer.tokens - self._since_tokens) // part
        self.at = now
