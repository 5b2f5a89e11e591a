"""Runs planned steps of one model on one rank.

Layer: kernel and runtime. It owns the network, the KV tensors and the request rows; it decides nothing about
who runs. On the CPU a step is done when `submit` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dataplane.config import EngineConfig
from dataplane.decoding.sampler import NOT_FINITE, sample
from dataplane.memory.kv_store import KVStore
from dataplane.models.loader import load_model
from dataplane.runtime.attention import AttentionBackend, TorchAttention
from dataplane.runtime.input_batch import InputBatch, StepInput
from dataplane.scheduling.plan import Plan, StepResult, StepSeconds


@dataclass(frozen=True, slots=True)
class DoneHandle:
    """A step that has run."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class ModelRunner:
    """The executor of a single rank."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        torch.set_num_threads(config.threads)
        shape = config.model.shape
        self._clock = clock
        self.model = load_model(
            config.model.path,
            shape,
            positions=config.model.max_model_len,
            dtype=getattr(torch, config.dtype),
            device=torch.device(config.device),
        )
        self.store = KVStore(shape, config.cache.num_blocks, config.cache.block_size)
        self.attention: AttentionBackend = TorchAttention(self.store, shape.heads)
        self.batch = InputBatch(config.scheduler.max_num_seqs, config.model.max_model_len, config.cache.block_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, those shared between embedding and head counted once."""
        storages = {
            place.untyped_storage().data_ptr(): place.untyped_storage() for place in self.model.weights().values()
        }
        return sum(storage.nbytes() for storage in storages.values())

    def submit(self, plan: Plan) -> DoneHandle:
        """Run one step."""
        started = self._clock()
        self.batch.update(plan)
        if plan.scrub:
            self.store.clear(plan.scrub)
        if not plan.tokens:
            return DoneHandle(StepResult({}))
        step = self.batch.gather(plan)
        with torch.inference_mode():
            attention = self.attention.plan(step)
            prepared = self._clock()
            hidden = self.model(step.token_ids, step.positions, attention)
            logits = self.model.logits(hidden[step.sample_at]) if step.sampled else None
            forwarded = self._clock()
            tokens, errors = self._sample(step, logits)
        sampled = self._clock()
        seconds = StepSeconds(prepare=prepared - started, forward=forwarded - prepared, sample=sampled - forwarded)
        return DoneHandle(StepResult(tokens, errors, seconds))

    def _sample(self, step: StepInput, logits: torch.Tensor | None) -> tuple[dict[str, list[int]], dict[str, str]]:
        if logits is None:
            return {}, {}
        chosen, bad = sample(logits, self.batch.params(step.sampled))
        tokens: dict[str, list[int]] = {}
        for request_id, token in zip(step.sampled, chosen, strict=True):
            self.batch.append(request_id, token)
            tokens[request_id] = [token]
        return tokens, {step.sampled[index]: NOT_FINITE for index in bad}
