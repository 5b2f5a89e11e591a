"""Logit bias: what a request adds to the logits of chosen tokens.

Layer: model algorithm. Built once per request, applied to its row at every token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class LogitBias:
    """`biases` by token id (OpenAI's `logit_bias`)."""

    __slots__ = ("_ids", "_values")

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._ids = torch.tensor(list(biases.keys()))
        self._values = torch.tensor(list(biases.values()), dtype=torch.float32)

    def apply(self, logits: Tensor) -> None:
        """Add to one row [vocab], in place."""
        logits[self._ids] += self._values
