"""From a client's call to what the engine core takes: prompts as tokens, parameters that hold for this model.

Layer: service. Joins tokenizer, chat template, tools and the grammar checker; refuses with the client's own names
of parameters. It submits nothing and keeps nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from dataplane.api_error import ApiError, invalid
from dataplane.grammar_check import GrammarChecker
from dataplane.openai import Call, ChatCall, CompletionCall
from dataplane.protocol import CoreReady, EngineRequest, SamplingParams
from dataplane.request import Request, RequestError, validate_params
from dataplane.scheduling.capacity import Room, reserve_max
from dataplane.scheduling.config import SchedulerConfig
from dataplane.tokenizer import Tokenizer
from dataplane.tools import ToolStyle, call_grammar, taught

INLINE_CHARACTERS = 8192
"""Longer prompts are tokenised in a thread, so that the event loop goes on serving."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the core is asked: each prompt `samples` times over."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    """One for each prompt; they differ by an output limit that was cut to the context."""
    samples: int

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.samples


class Intake:
    """Prepares calls for one model."""

    def __init__(self, tokenizer: Tokenizer, grammars: GrammarChecker, *, max_sequences: int) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._max_sequences = max_sequences

    async def prepare(self, call: Call, ready: CoreReady) -> Prepared:
        """Tokenise and check. Raises ApiError."""
        prompts = await self._encode(call, ready.max_model_len)
        params = self._params(call)
        prepared = Prepared(prompts, [_limited(call, params, prompt, ready) for prompt in prompts], call.samples)
        self._check_samples(call, prepared, ready)
        try:
            for prompt, own in zip(prompts, prepared.params, strict=True):
                self._validate(call, own, prompt, ready)
            if params.grammar is not None:
                await self._grammars.check(params.grammar)
        except RequestError as error:
            raise _named(error, call) from None
        return prepared

    async def count(self, call: Call, ready: CoreReady) -> list[int]:
        """Tokens of each prompt. Raises ApiError."""
        return [len(prompt) for prompt in await self._encode(call, ready.max_model_len)]

    async def _encode(self, call: Call, limit: int) -> list[list[int]]:
        if isinstance(call, ChatCall):
            size = sum(len(message["content"]) + 16 for message in call.messages) + 256 * len(call.tools.tools)
        elif isinstance(call, CompletionCall):
            size = sum(len(prompt) for prompt in call.prompts)
        try:
            if size <= INLINE_CHARACTERS:
                return self._tokenise(call, limit)
            return await asyncio.to_thread(self._tokenise, call, limit)
        except RequestError as error:
            raise _named(error, call) from None

    def _tokenise(self, call: Call, limit: int) -> list[list[int]]:
        if isinstance(call, ChatCall):
            return [self._chat(call, limit)]
        assert isinstance(call, CompletionCall)
        return [
            self._tokenizer.encode(prompt, limit=limit) if isinstance(prompt, str) else prompt
            for prompt in call.prompts
        ]

    def _chat(self, call: ChatCall, limit: int) -> list[int]:
        """The prompt of a chat, its tools told in the way this model knows."""
        style, messages = self._tokenizer.tool_style, call.messages
        if style is ToolStyle.UNTAUGHT:
            return self._tokenizer.apply_chat_template(taught(messages, call.tools), limit=limit)
        tools = [tool.described() for tool in call.tools.offered()]
        if tools and style is ToolStyle.UNKNOWN:
            raise RequestError("how this model calls tools is not supported", "unsupported_parameter", "tools")
        return self._tokenizer.apply_chat_template(messages, limit=limit, tools=tools or None)

    def _params(self, call: Call) -> SamplingParams:
        """The call's parameters, with those that only the tokenizer can tell."""
        params = call.params
        if call.bad_words:
            params = msgspec.structs.replace(params, bad_words=self._spelt(call.bad_words))
        if isinstance(call, ChatCall) and call.tools.tools:
            grammar = call_grammar(call.tools, self._tokenizer.tool_style)
            if grammar is not None and params.ignore_eos:
                raise invalid("ignore_eos cannot be used where a call to a tool is held to its schema", "ignore_eos")
            params = msgspec.structs.replace(params, grammar=grammar)
        return params

    def _spelt(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The words as tokens, at the start of a text and after a space (vLLM's reading of `bad_words`)."""
        bare = [word.lstrip() for word in words]
        texts = [*bare, *(f" {word}" for word in bare)]
        spelt = {tuple(self._tokenizer.encode(text, add_special_tokens=False)): None for text in texts}
        return tuple(tokens for tokens in spelt if tokens)

    def _validate(self, call: Call, params: SamplingParams, prompt: list[int], ready: CoreReady) -> None:
        """What the core would refuse is refused here already. Raises RequestError."""
        vocabulary = self._tokenizer.vocab_size
        if not isinstance(call, ChatCall) and any(not 0 <= token < vocabulary for token in prompt):
            raise RequestError(f"prompt holds a token id outside 0 to {vocabulary - 1}", param="prompt")
        validate_params(params, vocab_size=vocabulary, max_model_len=ready.max_model_len, prompt_len=len(prompt))
        forks = tuple(str(number) for number in range(1, call.samples))
        asked = EngineRequest(request_id="0", prompt_token_ids=prompt, params=params, arrived_at=0.0, forks=forks)
        room = Room(
            SchedulerConfig(), ready.total_blocks, ready.block_size, reserve_max if ready.reserves_max else None
        )
        room.check(Request.of(asked, now=0.0, max_model_len=ready.max_model_len, seed=0))

    def _check_samples(self, call: Call, prepared: Prepared, ready: CoreReady) -> None:
        name = "best_of" if call.samples > call.n else "n"
        most = ready.max_num_seqs or call.samples
        if call.samples > most:
            raise invalid(f"{name} must be at most {most} with this engine, got {call.samples}", name)
        if prepared.sequences > self._max_sequences:
            raise invalid(
                f"{len(prepared.prompts)} prompts with {call.samples} samples each are more than the "
                f"{self._max_sequences} sequences this replica takes",
                name if call.samples > 1 else "prompt",
            )


def _limited(call: Call, params: SamplingParams, prompt: list[int], ready: CoreReady) -> SamplingParams:
    """`params` for this prompt: a limit that the client did not set takes no more than the context has left."""
    room = ready.max_model_len - len(prompt)
    if call.limit_given or params.max_tokens is None or not 0 < room < params.max_tokens:
        return params
    return msgspec.structs.replace(params, max_tokens=room)


def _named(error: RequestError, call: Call) -> ApiError:
    """A refusal under the name the client used."""
    return invalid(error.message, call.own_name(error.param), error.code)
