"""Runs planned steps of one model on one rank.

Layer: kernel and runtime. It owns the KV tensors and the request rows; it decides nothing about
who runs, and what computes a step is behind `Forward`. On the CPU a step is done when `submit` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dataplane.config import EngineConfig, ForwardKind
from dataplane.decoding.grammar import GrammarCompiler, GrammarError
from dataplane.decoding.logprobs import ROWS_AT_ONCE, score
from dataplane.decoding.sampler import NOT_FINITE, sample
from dataplane.memory.kv_store import KVStore
from dataplane.models.loader import load_model
from dataplane.protocol import TokenLogprob
from dataplane.request import RequestError
from dataplane.runtime.attention import TorchAttention
from dataplane.runtime.forward import EagerForward, Forward, PlannedStep
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
        self._clock = clock
        self.store = KVStore(
            config.model.shape, config.cache.num_blocks, config.cache.block_size, config.cache.host_blocks
        )
        self.forward = _forward(config, self.store)
        self.connector = connect(self.store) if connect else None
        self.batch = InputBatch(
            config.scheduler.max_num_seqs, config.model.max_model_len, config.cache.block_size, grammars
        )

    def close(self) -> None:
        """No step may be submitted after it."""
        self.forward.close()

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
        planned = self.forward.plan(step)
        prepared = self._clock()
        planned.run()
        ran = self._clock()
        result = StepResult({})
        for request_id, refusal in refused.items():
            _fail(result, request_id, refusal.message, refusal)
        with torch.inference_mode():
            if step.scored:
                self._score_prompts(step, planned, result)
            scored = self._clock()
            logits = planned.logits(step.sample_at) if step.sampled else None
            forwarded = self._clock()
            if logits is not None:
                self._sample(step, logits, result)
        sampled = self._clock()
        seconds = StepSeconds(
            prepare=prepared - started,
            forward=(ran - prepared) + (forwarded - scored),
            sample=(scored - ran) + (sampled - forwarded),
        )
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

    def _score_prompts(self, step: StepInput, planned: PlannedStep, result: StepResult) -> None:
        """Score the prompt tokens that follow this step's positions."""
        for span in step.scored:
            (row,) = self.batch.params([span.request_id])
            top = row.params.prompt_logprobs or 0
            scores: list[TokenLogprob | None] = [None] if span.first else []
            for at in range(0, len(span.targets), ROWS_AT_ONCE):
                targets = span.targets[at : at + ROWS_AT_ONCE]
                logits = planned.logits(torch.arange(span.at + at, span.at + at + len(targets)))
                scores += score(logits, targets, [top] * len(targets))
            if not all(math.isfinite(scored.logprob) for scored in scores if scored is not None):
                _fail(result, span.request_id, NOT_FINITE)
            result.prompt_logprobs[span.request_id] = scores


def _forward(config: EngineConfig, store: KVStore) -> Forward:
    model = config.model
    if config.forward is ForwardKind.CAPTURED:
        # Its kernels are compiled and loaded with the module.
        from dataplane.runtime.captured_forward import CapturedForward

        return CapturedForward.load(
            model.path,
            model.shape,
            store,
            weights=config.weights,
            positions=model.max_model_len,
            threads=config.threads,
            tokens=config.scheduler.max_num_batched_tokens,
        )
    loaded = load_model(
        model.path,
        model.shape,
        positions=model.max_model_len,
        dtype=getattr(torch, config.dtype),
        device=torch.device(config.device),
    )
    return EagerForward(loaded, TorchAttention(store, model.shape.heads))


def _fail(result: StepResult, request_id: str, sentence: str, refusal: RequestError | None = None) -> None:
    """Note an error of one request. A failure of the engine outweighs what the request itself is at fault for."""
    if refusal is None:
        result.errors[request_id] = sentence
        result.refusals.pop(request_id, None)
    elif request_id not in result.errors or request_id in result.refusals:
        result.errors[request_id], result.refusals[request_id] = sentence, refusal
