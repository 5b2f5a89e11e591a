"""Persistent rows of the requests an executor holds, and the inputs of one step gathered from them.

Layer: kernel and runtime. Rows live from a request's first step to its last; a step reads them by index and
makes fresh arrays, so nothing in flight is ever changed. No work here grows with a request's history.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataplane.decoding.sampler import RowParams
from dataplane.scheduling.plan import NewRequest, Plan, RunningRequest

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's flat inputs. Requests are ordered with decodes (one token) first, then by the plan.

    T tokens of R requests: `token_ids`, `positions` and `slots` are [T]; `starts` (tokens before this step),
    `counts` (tokens in it) and `rows` are [R]; `tables` [R, n] is padded with the null block.
    `sampled` names the requests that yield a token, `sample_at` [S] where in T their last token lies.
    """

    request_ids: list[str]
    rows: Ints
    starts: Ints
    counts: Ints
    decodes: int
    tables: Ints
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled: list[str]
    sample_at: Tensor


class InputBatch:
    """`max_rows` rows of up to `max_len` tokens."""

    def __init__(self, max_rows: int, max_len: int, block_size: int) -> None:
        self.block_size = block_size
        self._tokens = np.zeros((max_rows, max_len), dtype=np.int64)
        self._tables = np.zeros((max_rows, -(-max_len // block_size)), dtype=np.int64)
        self._lengths = np.zeros(max_rows, dtype=np.int64)
        self._computed = np.zeros(max_rows, dtype=np.int64)
        self._blocks = np.zeros(max_rows, dtype=np.int64)
        self._free = list(range(max_rows - 1, -1, -1))
        self._row: dict[str, int] = {}
        self._params: dict[str, RowParams] = {}

    def __len__(self) -> int:
        return len(self._row)

    def update(self, plan: Plan) -> None:
        """Bring the rows to where `plan` starts."""
        for request_id in plan.dropped:
            self._drop(request_id)
        for new in plan.new:
            self._add(new)
        for running in plan.running:
            self._advance(running)

    def gather(self, plan: Plan) -> StepInput:
        """The inputs of `plan`, for rows that `update` has brought up to it."""
        order = sorted(plan.tokens, key=lambda request_id: plan.tokens[request_id] > 1)
        rows = np.array([self._row[request_id] for request_id in order], dtype=np.int64)
        counts = np.array([plan.tokens[request_id] for request_id in order], dtype=np.int64)
        starts = self._computed[rows]
        ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(rows)), counts)
        positions = starts[owner] + np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        blocks = self._tables[rows[owner], positions // self.block_size]
        width = int(-(-(starts + counts).max() // self.block_size))
        sampled = [request_id for request_id in order if request_id in plan.samples]
        last = [int(end) - 1 for request_id, end in zip(order, ends, strict=True) if request_id in plan.samples]
        return StepInput(
            request_ids=order,
            rows=rows,
            starts=starts,
            counts=counts,
            decodes=int((counts == 1).sum()),
            tables=self._tables[rows, :width],
            token_ids=torch.from_numpy(self._tokens[rows[owner], positions]),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(blocks * self.block_size + positions % self.block_size),
            sampled=sampled,
            sample_at=torch.tensor(last, dtype=torch.int64),
        )

    def params(self, request_ids: list[str]) -> list[RowParams]:
        """How to sample for each request, with its progress."""
        return [self._params[request_id] for request_id in request_ids]

    def append(self, request_id: str, token: int) -> None:
        """Take a sampled token into the request's row."""
        row = self._row[request_id]
        if self._lengths[row] < self._tokens.shape[1]:
            self._tokens[row, self._lengths[row]] = token
            self._lengths[row] += 1
        self._params[request_id].take(token)

    def _add(self, new: NewRequest) -> None:
        row = self._free.pop()
        self._row[new.request_id] = row
        self._tokens[row, : len(new.tokens)] = new.tokens
        self._lengths[row] = len(new.tokens)
        self._tables[row] = 0
        self._tables[row, : len(new.blocks)] = new.blocks
        self._blocks[row] = len(new.blocks)
        self._computed[row] = new.computed
        self._params[new.request_id] = RowParams(new.params, new.seed, new.stop_ids, new.tokens, new.prompt_len)

    def _advance(self, running: RunningRequest) -> None:
        row = self._row[running.request_id]
        held, more = int(self._blocks[row]), len(running.new_blocks)
        if more:
            self._tables[row, held : held + more] = running.new_blocks
            self._blocks[row] = held + more
        self._computed[row] = running.computed

    def _drop(self, request_id: str) -> None:
        """Free a row. A request that ended before its first step has none."""
        row = self._row.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            del self._params[request_id]
