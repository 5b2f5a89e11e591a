"""What the parts of the scheduler's bench have in common.

Layer: service. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataplane.bench.report import Table
from dataplane.bench.stepcost import OPT_13B_A100, StepCost
from dataplane.bench.traces import Traces
from dataplane.memory.manager import KVManager

BLOCK = 16
CONTEXT = 2048
"""Longest prompt and output together: OPT-13B's."""
A100_40G_SLOTS = 15_700
"""KV slots that OPT-13B leaves on an A100 of 40 GB (PagedAttention, table 1)."""
A100_80G_SLOTS = 66_144
"""KV slots on one of 80 GB, which the step's cost was measured on (DistServe, max_num_tokens.csv)."""
MANY = 1_000_000
"""More requests than ever wait."""


@dataclass(frozen=True, slots=True)
class SchedulerCase:
    """All that shapes a run. `quick` makes it small: the directions stay, the figures are rough."""

    seed: int = 0
    quick: bool = False
    cost: StepCost = OPT_13B_A100

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Section:
    """What one part found."""

    tables: list[Table] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)


Experiment = Callable[[SchedulerCase, Traces], Section]
"""Raises TraceMissingError when it has nothing to go by."""


def pool(slots: int, block_size: int = BLOCK, *, caching: bool = False) -> KVManager:
    """Room for `slots` tokens, and the null block."""
    return KVManager(slots // block_size + 1, block_size, prefix_caching=caching)
