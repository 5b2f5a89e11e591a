"""The offline API: a model in this process, prompts in, completions out.

Layer: service. It drives the same `EngineCore` that serves; it adds tokenizer, detokenizer and a loop, and no
policy.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from dataplane.config import EngineConfig
from dataplane.detokenizer import IncrementalDetokenizer
from dataplane.engine import EngineCore
from dataplane.protocol import EngineRequest, FinishReason, RequestOutput, SamplingParams, Timing, TokenLogprob
from dataplane.request import RequestError
from dataplane.tokenizer import load_tokenizer

Prompt = str | list[int]
DEFAULT_PARAMS = SamplingParams(max_tokens=128)
"""Of prompts that come without any: an answer of moderate length, not one up to the end of the context."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished prompt. `token_ids` holds every generated token, also one that ended it and is not shown.

    `stop_reason` is the stop string or the stop id that ended it; None for the end of sequence and the limit.
    `logprobs` has one entry for each of `token_ids`, `prompt_logprobs` one for each prompt token, None for the first;
    both are None where they were not asked for.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish: FinishReason
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    timing: Timing | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class _Progress:
    """One sample of a request while it runs."""

    def __init__(self, request: EngineRequest, detokenizer: IncrementalDetokenizer) -> None:
        self.prompt, self.detokenizer = request.prompt_token_ids, detokenizer
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] | None = None if request.params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None

    def take(self, output: RequestOutput) -> None:
        """A token that ended the request by its id has no text."""
        self.token_ids += output.token_ids
        if self.logprobs is not None:
            self.logprobs += output.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        shown = output.token_ids[:-1] if output.finish is FinishReason.STOP else output.token_ids
        self.text += self.detokenizer.push(shown)
        if output.finish is not None:
            self.text += self.detokenizer.flush()

    def completion(self, last: RequestOutput) -> Completion:
        stopped = self.detokenizer.stopped
        return Completion(
            prompt_token_ids=self.prompt,
            token_ids=self.token_ids,
            text=self.text,
            finish=FinishReason.STOP if stopped else last.finish or FinishReason.ERROR,
            stop_reason=stopped or last.stop_reason,
            cached_tokens=last.cached_tokens,
            timing=last.timing,
            error=last.error,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class LLM:
    """`LLM("smollm2").generate(["Once upon a time"])`. Keywords are those of `EngineConfig.resolve`.

    Closed at the end of a `with` block, or by `close`.
    """

    def __init__(self, model: str | Path = "smollm2", **overrides: Any) -> None:
        self.config = EngineConfig.resolve(model, **overrides)
        self.tokenizer = load_tokenizer(self.config.model.path)
        self.core = EngineCore(self.config)
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread in which steps run, if they have one; nothing is to be generated any more."""
        self.core.close()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *, n: int = 1
    ) -> list[Completion]:
        """Complete texts or token ids; the completions come in the order of the prompts, `n` for each.

        A text is taken as it is; `chat` puts a question into the model's chat template. Without `params` they are
        `DEFAULT_PARAMS`; parameters without `max_tokens` go on to the end of the context. The samples of a prompt
        compute it once; the k-th draws with the seed of the first plus k. Only the first has `prompt_logprobs`. No
        prompts have no completions. Raises RequestError, before any of them runs, when one prompt cannot; it names it.
        """
        if not 1 <= n <= self.config.scheduler.max_num_seqs:
            raise RequestError(f"n must be between 1 and {self.config.scheduler.max_num_seqs}, got {n}", param="n")
        tokens = [self._tokens(prompt, index) for index, prompt in enumerate(prompts)]
        requests = [
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=chosen,
                arrived_at=time.time(),
                forks=tuple(f"{request_id}.{fork}" for fork in range(1, n)),
            )
            for prompt, chosen in zip(tokens, self._params(params, len(tokens)), strict=True)
            for request_id in [f"offline-{next(self._ids)}"]
        ]
        for index, request in enumerate(requests):
            try:
                self.core.validate(request)
            except RequestError as error:
                raise RequestError(f"prompts[{index}]: {error.message}", error.code, error.param) from None
        try:
            return self._run(requests)
        finally:
            self.core.abort(request_id for request in requests for request_id in (request.request_id, *request.forks))

    def chat(
        self,
        conversations: Sequence[dict[str, Any]] | Sequence[list[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_variables: Any,
    ) -> list[Completion]:
        """Answer one conversation (a list of messages) or several, through the model's chat template."""
        several: list[list[dict[str, Any]]] = (
            [list(conversations)] if conversations and isinstance(conversations[0], dict) else list(conversations)  # type: ignore[arg-type]
        )
        prompts = [self.tokenizer.apply_chat_template(messages, **template_variables) for messages in several]
        return self.generate(prompts, params)

    def _tokens(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError(
                f"prompts[{index}] must be a text or a list of token ids", "invalid_type", "prompt"
            ) from None

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or DEFAULT_PARAMS] * count
        if len(params) != count:
            raise RequestError(f"{count} prompts came with {len(params)} sampling parameters", param="params")
        return params

    def _run(self, requests: list[EngineRequest]) -> list[Completion]:
        running: dict[str, _Progress] = {}
        done: dict[str, Completion] = {}
        queued = 0
        while queued < len(requests) or self.core.has_work():
            for request in requests[queued : queued + self.core.room]:
                self.core.add(request)
                queued += 1
                for request_id in (request.request_id, *request.forks):
                    detokenizer = IncrementalDetokenizer(
                        self.tokenizer, request.params.stop, min_tokens=request.params.min_tokens
                    )
                    running[request_id] = _Progress(request, detokenizer)
            for output in self.core.step():
                self._take(output, running, done)
            if pause_s := self.core.pause_s:
                # This thread alone feeds and drives the core: no event can come before the moment it names.
                time.sleep(pause_s)
        return [done[request_id] for request in requests for request_id in (request.request_id, *request.forks)]

    def _take(self, output: RequestOutput, running: dict[str, _Progress], done: dict[str, Completion]) -> None:
        progress = running[output.request_id]
        progress.take(output)
        if output.finish is None and progress.detokenizer.stopped is not None:
            for last in self.core.abort([output.request_id]):
                done[last.request_id] = running[last.request_id].completion(last)
        elif output.finish is not None:
            done[output.request_id] = progress.completion(output)
