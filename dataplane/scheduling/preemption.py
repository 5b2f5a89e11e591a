"""How a request that lost its blocks gets its KV back: copied from host memory, or computed again.

Layer: scheduling. Pure. Copying s tokens of k bytes out and in takes 2·k·s / BW_host; computing them takes a prefill of
s (vLLM, section 4.5). Prefill grows faster than linearly and has a fixed cost, so the two cross. Who is preempted is
the scheduler's affair.
"""

from __future__ import annotations

from collections.abc import Callable

from dataplane.scheduling.config import Preemption, SchedulerConfig
from dataplane.scheduling.plan import Plan

PrefillSeconds = Callable[[int], float]
"""Seconds that a prefill of so many tokens takes."""

REMEMBERED = 0.95
"""What a measurement still weighs after the next one."""


class PrefillSpeed:
    """Seconds per prefill token, as the steps that are mostly prefill show it; a given speed until there is one."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens, self._seconds = 0.0, 0.0
        self._given = 1.0 / tokens_per_s

    def observe(self, plan: Plan, seconds: float) -> None:
        """A step took `seconds`. One that is mostly decode says nothing of prefill."""
        if seconds > 0.0 and 2 * plan.prefill_tokens >= plan.total_tokens:
            self._tokens = REMEMBERED * self._tokens + plan.total_tokens
            self._seconds = REMEMBERED * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        return tokens * (self._seconds / self._tokens if self._tokens else self._given)


class PreemptionPolicy:
    """Chooses between swap and recompute. `kv_bytes` is the size of one token's KV."""

    def __init__(self, config: SchedulerConfig, kv_bytes: int, prefill_seconds: PrefillSeconds | None = None) -> None:
        self._mode = config.preemption
        self._swap_s_per_token = 2 * kv_bytes / config.swap_bytes_per_s
        self._speed = PrefillSpeed(config.prefill_tokens_per_s)
        self._prefill_seconds = prefill_seconds or self._speed.seconds

    def swaps(self, tokens: int) -> bool:
        """Whether a request with `tokens` tokens of KV goes to host memory, if there is room."""
        if self._mode is Preemption.AUTO:
            return self._swap_s_per_token * tokens < self._prefill_seconds(tokens)
        return self._mode is Preemption.SWAP

    def observe(self, plan: Plan, seconds: float) -> None:
        """A step took `seconds`: what prefill costs may be learnt from it."""
        if self._mode is Preemption.AUTO and plan.prefill_tokens:
            self._speed.observe(plan, seconds)
