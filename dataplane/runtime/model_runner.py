"""Runs planned steps of one model on one rank.

Layer: kernel and runtime. It owns the network, the KV tensors and the request rows; it decides nothing about
who runs. On the CPU a step is done when `submit` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dataplane.config import EngineConfig
from dataplane.decoding.grammar import GrammarCompiler, GrammarError
from dataplane.decoding.logprobs import ROWS_AT_ONCE, score
from dataplane.decoding.sampler import NOT_FINITE, sample
from dataplane.memory.kv_store import KVStore
from dataplane.models.loader import load_model
from dataplane.protocol import TokenLogprob
from dataplane.request import RequestError
from dataplane.runtime.attention import AttentionBackend, TorchAttention
from dataplane.runtime.input_batch import InputBatch, StepInput
from dataplane.scheduling.connector import KVConnector
from dataplane.scheduling.plan import Plan, StepResult, StepSeconds


@dataclass(frozen=True, slots=True)
class DoneHandle:
    """A step that has run."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class ModelRunner:
    """The executor of a single rank. `connect` makes what loads remote KV into its tensors."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        grammars: GrammarCompiler | None = None,
        connect: Callable[[KVStore], KVConnector] | None = None,
    ) -> None:
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
        self.store = KVStore(shape, config.cache.num_blocks, config.cache.block_size, config.cache.host_blocks)
        self.connector = connect(self.store) if connect else None
        self.attention: AttentionBackend = TorchAttention(self.store, shape.heads)
        self.batch = InputBatch(
            config.scheduler.max_num_seqs, config.model.max_model_len, config.cache.block_size, grammars
        )

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
        refused = self.batch.update(plan)
        if plan.scrub:
            self.store.clear(plan.scrub)
        if plan.transfers:
            self.store.move(plan.transfers)
        for load in plan.loads:
            assert self.connector is not None
            self.connector.start_load(load)
        if not plan.tokens:
            return DoneHandle(StepResult({}))
        step = self.batch.gather(plan)
        with torch.inference_mode():
            attention = self.attention.plan(step)
            prepared = self._clock()
            hidden = self.model(step.token_ids, step.positions, attention)
            logits = self.model.logits(hidden[step.sample_at]).float() if step.sampled else None
            forwarded = self._clock()
            result = StepResult({})
            for request_id, refusal in refused.items():
                _fail(result, request_id, refusal.message, refusal)
            self._score_prompts(step, hidden, result)
            if logits is not None:
                self._sample(step, logits, result)
        sampled = self._clock()
        seconds = StepSeconds(prepare=prepared - started, forward=forwarded - prepared, sample=sampled - forwarded)
        return DoneHandle(replace(result, seconds=seconds))

    def _sample(self, step: StepInput, logits: Tensor, result: StepResult) -> None:
        """Choose a token for each of the step's rows; score those that were asked to be scored."""
        rows = self.batch.params(step.sampled)
        asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        untouched = logits[asked]
        chosen, bad = sample(logits, rows)
        for index, (request_id, token) in enumerate(zip(step.sampled, chosen, strict=True)):
            if index in bad:
                refusal = None if bad[index] == NOT_FINITE else rows[index].unsatisfiable(bad[index])
                _fail(result, request_id, bad[index], refusal)
                rows[index].grammar = None
            try:
                self.batch.append(request_id, token)
            except GrammarError as error:
                _fail(result, request_id, str(error), rows[index].unsatisfiable(str(error)))
            result.tokens[request_id] = [token]
        if asked:
            tops = [rows[index].params.logprobs or 0 for index in asked]
            scores = score(untouched, torch.tensor([chosen[index] for index in asked]), tops)
            result.logprobs.update(
                {step.sampled[index]: [scored] for index, scored in zip(asked, scores, strict=True) if index not in bad}
            )

    def _score_prompts(self, step: StepInput, hidden: Tensor, result: StepResult) -> None:
        """Score the prompt tokens that follow this step's positions."""
        for span in step.scored:
            (row,) = self.batch.params([span.request_id])
            top = row.params.prompt_logprobs or 0
            scores: list[TokenLogprob | None] = [None] if span.first else []
            for at in range(0, len(span.targets), ROWS_AT_ONCE):
                targets = span.targets[at : at + ROWS_AT_ONCE]
                logits = self.model.logits(hidden[span.at + at : span.at + at + len(targets)]).float()
                scores += score(logits, targets, [top] * len(targets))
            if not all(math.isfinite(scored.logprob) for scored in scores if scored is not None):
                _fail(result, span.request_id, NOT_FINITE)
            result.prompt_logprobs[span.request_id] = scores


def _fail(result: StepResult, request_id: str, sentence: str, refusal: RequestError | None = None) -> None:
    """Note an error of one request. A failure of the engine outweighs what the request itself is at fault for."""
    if refusal is None:
        result.errors[request_id] = sentence
        result.refusals.pop(request_id, None)
    elif request_id not in result.errors or request_id in result.refusals:
        result.errors[request_id], result.refusals[request_id] = sentence, refusal
