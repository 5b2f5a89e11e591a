"""Persistent rows of the requests an executor holds, and the inputs of one step gathered from them.

Layer: kernel and runtime. Rows live from a request's first step to its last; a step reads them by index and
makes fresh arrays, so nothing in flight is ever changed. All tokens of a request are copied in its first step alone;
each of its steps copies its block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataplane.decoding.grammar import GrammarCompiler, GrammarError
from dataplane.decoding.sampler import RowParams
from dataplane.request import RequestError
from dataplane.scheduling.plan import NewRequest, Plan, RunningRequest

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Positions of a prompt whose logits are to be compared with the token that follows: `count` from `at` in T.

    `targets` [count] are those tokens; `first` says that the span begins the prompt.
    """

    request_id: str
    at: int
    targets: Tensor
    first: bool


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's flat inputs. Requests are ordered with decodes (one token) first, then by the plan.

    T tokens of R requests: `token_ids`, `positions` and `slots` are [T]; `starts` (tokens before this step),
    `counts` (tokens in it) and `rows` are [R]; `tables` [R, n] is padded with the null block.
    `sampled` names the requests that yield a token, `sample_at` [S] where in T the token before it lies: their own
    last token, or for a fork that starts in this step its parent's. `scored` are the prompt positions to be scored.
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
    scored: list[ScoredSpan]


class InputBatch:
    """`max_rows` rows of up to `max_len` tokens. `grammars` compiles those of requests that have one."""

    def __init__(self, max_rows: int, max_len: int, block_size: int, grammars: GrammarCompiler | None = None) -> None:
        self.block_size = block_size
        self._grammars = grammars
        self._tokens = np.zeros((max_rows, max_len), dtype=np.int64)
        self._tables = np.zeros((max_rows, -(-max_len // block_size)), dtype=np.int64)
        self._lengths = np.zeros(max_rows, dtype=np.int64)
        self._computed = np.zeros(max_rows, dtype=np.int64)
        self._blocks = np.zeros(max_rows, dtype=np.int64)
        self._free = list(range(max_rows - 1, -1, -1))
        self._row: dict[str, int] = {}
        self._params: dict[str, RowParams] = {}
        self._scored: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._row)

    def update(self, plan: Plan) -> dict[str, RequestError]:
        """Bring the rows to where `plan` starts; the new requests whose grammar cannot take up where they stand.

        These have a row without it, which is there for the steps that were planned before they are known.
        """
        for request_id in plan.dropped:
            self._drop(request_id)
        refused = {new.request_id: refusal for new in plan.new if (refusal := self._add(new)) is not None}
        for running in plan.running:
            self._advance(running)
        return refused

    def gather(self, plan: Plan) -> StepInput:
        """The inputs of `plan`, for rows that `update` has brought up to it. Its tokens count as computed from now."""
        order = sorted(plan.tokens, key=lambda request_id: plan.tokens[request_id] > 1)
        rows = np.array([self._row[request_id] for request_id in order], dtype=np.int64)
        counts = np.array([plan.tokens[request_id] for request_id in order], dtype=np.int64)
        starts = self._computed[rows]
        self._computed[rows] += counts
        ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(rows)), counts)
        positions = starts[owner] + np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        blocks = self._tables[rows[owner], positions // self.block_size]
        width = int(-(-(starts + counts).max() // self.block_size))
        last = {request_id: int(end) - 1 for request_id, end in zip(order, ends, strict=True)}
        sampled = {request_id: last[request_id] for request_id in order if request_id in plan.samples}
        sampled |= {new.request_id: last[new.parent] for new in plan.new if new.parent}
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
            sampled=list(sampled),
            sample_at=torch.tensor(list(sampled.values()), dtype=torch.int64),
            scored=self._spans(order, starts, counts, ends - counts) if self._scored else [],
        )

    def _spans(self, order: list[str], starts: Ints, counts: Ints, places: Ints) -> list[ScoredSpan]:
        """What of each prompt is to be scored in this step. The last token of a prompt has none after it in it."""
        spans = []
        for request_id, start, count, at in zip(order, starts.tolist(), counts.tolist(), places.tolist(), strict=True):
            prompt_len = self._scored.get(request_id, 0)
            end = min(start + count, prompt_len - 1)
            if start < prompt_len:
                targets = torch.from_numpy(self._tokens[self._row[request_id], start + 1 : end + 1].copy())
                spans.append(ScoredSpan(request_id, at, targets, first=start == 0))
            if start + count >= prompt_len:
                self._scored.pop(request_id, None)
        return spans

    def params(self, request_ids: list[str]) -> list[RowParams]:
        """How to sample for each request, with its progress."""
        return [self._params[request_id] for request_id in request_ids]

    def append(self, request_id: str, token: int) -> None:
        """Take a sampled token into the request's row. Raises GrammarError when its grammar does not allow it."""
        row = self._row[request_id]
        if self._lengths[row] < self._tokens.shape[1]:
            self._tokens[row, self._lengths[row]] = token
            self._lengths[row] += 1
        self._params[request_id].take(token)

    def _add(self, new: NewRequest) -> RequestError | None:
        row = self._free.pop()
        self._row[new.request_id] = row
        self._tokens[row, : len(new.tokens)] = new.tokens
        self._lengths[row] = len(new.tokens)
        self._tables[row] = 0
        self._tables[row, : len(new.blocks)] = new.blocks
        self._blocks[row] = len(new.blocks)
        self._computed[row] = new.computed
        params = RowParams(new.params, new.seed, new.stop_ids, new.tokens, new.prompt_len)
        self._params[new.request_id] = params
        if new.params.prompt_logprobs is not None and len(new.tokens) == new.prompt_len:
            self._scored[new.request_id] = new.prompt_len
        if new.params.grammar is not None:
            assert self._grammars is not None, "a request with a grammar came to an executor that has no compiler"
            try:
                params.grammar = self._grammars.compile(new.params.grammar).start(new.tokens[new.prompt_len :])
            except RequestError as error:
                return error
            except GrammarError as error:
                return params.unsatisfiable(str(error))
        return None

    def _advance(self, running: RunningRequest) -> None:
        row = self._row[running.request_id]
        held, more = int(self._blocks[row]), len(running.new_blocks)
        if more:
            self._tables[row, held : held + more] = running.new_blocks
            self._blocks[row] = held + more
        if running.replaced is not None:
            index, block = running.replaced
            self._tables[row, index] = block
        self._computed[row] = running.computed

    def _drop(self, request_id: str) -> None:
        """Free a row. A request that ended before its first step has none."""
        row = self._row.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            del self._params[request_id]
            self._scored.pop(request_id, None)
