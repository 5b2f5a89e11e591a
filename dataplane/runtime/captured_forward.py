"""A network recorded as programs and run by the CPU's own kernels.

Layer: kernel and runtime. It hands a step's arrays to the executor as they are: how many tokens and requests a step
has is a number of the run, so that one recording serves every step and there are no buckets.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dataplane.decoding.logprobs import ROWS_AT_ONCE
from dataplane.kernels.cpu.build import tier
from dataplane.kernels.cpu.executor import KV, CpuExecutor, Step
from dataplane.kernels.program import Embed, Linear
from dataplane.memory.kv_store import KVStore
from dataplane.models.loader import outline
from dataplane.models.shape import ModelShape
from dataplane.models.sources import open_source
from dataplane.models.weight_format import WeightFormat
from dataplane.runtime.cpu_capture import Captured, capture
from dataplane.runtime.cpu_weights import CpuWeights
from dataplane.runtime.forward import ForwardFacts, PlannedStep
from dataplane.runtime.input_batch import StepInput


class CapturedForward:
    """`captured` over the tensors of `store`, for steps of up to `tokens` tokens."""

    def __init__(self, captured: Captured, facts: ForwardFacts, store: KVStore, *, threads: int, tokens: int) -> None:
        self.facts = facts
        self._executor = CpuExecutor(threads)
        kv = KV(
            [tensor.numpy() for tensor in store.keys], [tensor.numpy() for tensor in store.values], store.block_size
        )
        self._body = self._executor.load(captured.body, rows=tokens, kv=kv)
        self._head = self._executor.load(captured.head, rows=ROWS_AT_ONCE)
        self._logits = np.empty((ROWS_AT_ONCE, captured.head.out_width), dtype=np.float32)

    @classmethod
    def load(
        cls,
        path: Path,
        shape: ModelShape,
        store: KVStore,
        *,
        weights: WeightFormat,
        positions: int,
        threads: int,
        tokens: int,
    ) -> CapturedForward:
        """The network of `path`. Raises CheckpointError where a tensor is missing, left over, or cannot be packed."""
        with ExitStack() as stack:
            source = open_source(path, shape, stack)
            model = outline(source, shape, positions, path.name)
            packed = CpuWeights(model, source, shape, positions, weights)
            captured = capture(model, shape.hidden, packed)
        head = next(op.weight for op in captured.head.operations if isinstance(op, Linear))
        table = next(op.table for op in captured.body.operations if isinstance(op, Embed))
        facts = ForwardFacts(
            kind="captured",
            attention="cpu",
            tier=tier(),
            weights=weights,
            weight_bytes=packed.nbytes,
            head_bytes=head.nbytes,
            embedding_bytes=0 if table is head else table.nbytes,
        )
        return cls(captured, facts, store, threads=threads, tokens=tokens)

    def plan(self, step: StepInput) -> PlannedStep:
        inputs = Step(
            ids=step.token_ids.numpy(),
            positions=step.positions.numpy(),
            slots=step.slots.numpy(),
            tables=step.tables,
            starts=step.starts,
            counts=step.counts,
        )
        return _CapturedStep(self, inputs)

    def run(self, inputs: Step) -> None:
        """Replay the body. Its result lies in the executor's arena until the next."""
        self._body.run(inputs)

    def logits(self, rows: Tensor, tokens: int) -> Tensor:
        """Replay the head on `rows` of the last body's result, which has `tokens` rows."""
        count = len(rows)
        if count > len(self._logits):
            self._logits = np.empty((count, self._logits.shape[1]), dtype=np.float32)
        source, taken = self._body.result(tokens), rows.numpy()
        for at in range(0, count, ROWS_AT_ONCE):
            end = min(at + ROWS_AT_ONCE, count)
            self._head.take(source, taken[at:end], self._logits[at:end])
        return torch.from_numpy(self._logits[:count])

    def close(self) -> None:
        self._executor.close()


class _CapturedStep:
    def __init__(self, forward: CapturedForward, inputs: Step) -> None:
        self._forward, self._inputs = forward, inputs

    def run(self) -> None:
        self._forward.run(self._inputs)

    def logits(self, rows: Tensor) -> Tensor:
        return self._forward.logits(rows, len(self._inputs.ids))
