"""The scheduler's configuration. Layer: scheduling. Pure; `EngineConfig` holds and validates it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may do."""

    max_num_seqs: int = 128
    """Requests running at once."""
    max_num_batched_tokens: int = 512
    """The token budget of one step: how long a running request can be held up by others' prefill."""
    long_prefill_threshold: int = 0
    """The most prompt tokens of one request in one step; 0 leaves it to the budget."""
    watermark: float = 0.01
    """Share of the blocks that an admission must leave free, so that running requests can grow."""
    max_waiting: int = 4096
    """Requests waiting at once; one more is refused."""
