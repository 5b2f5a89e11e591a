"""One choice's part of an answer: echo, text, calls to tools and log-probabilities, in the order they came.

Layer: service. What a choice gives out goes in; what the client is told comes out, streamed or whole. It sends
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dataplane.attempt import Choice
from dataplane.detokenizer import IncrementalDetokenizer
from dataplane.logprob_trail import Placed
from dataplane.openai import Call, ChatCall, CompletionCall
from dataplane.openai_bodies import Answer, Responder
from dataplane.openai_logprobs import LogprobBodies
from dataplane.protocol import FinishReason, TokenLogprob
from dataplane.tokenizer import Tokenizer
from dataplane.tool_calls import Piece, ToolCall, ToolCallScanner


class ChoiceWriter:
    """Writes one choice. `index` is the client's number of it."""

    def __init__(self, call: Call, choice: Choice, responder: Responder, tokenizer: Tokenizer, index: int) -> None:
        self.choice = choice
        self.index = index
        self._call = call
        self._responder = responder
        self._tokenizer = tokenizer
        self._bodies = LogprobBodies(tokenizer) if call.shows_logprobs else None
        self._echo = Echo.of(call, choice, tokenizer) if isinstance(call, CompletionCall) and call.echo else None
        self._scanner = (
            ToolCallScanner(call.tools, tokenizer.tool_style)
            if isinstance(call, ChatCall) and call.tools.tools
            else None
        )
        self._calls = 0
        self._opened = False
        self._told = False
        self.closed = False

    # Streamed ------------------------------------------------------------------------------------------------

    def events(self) -> bytes:
        """What is new of the choice."""
        choice, responder = self.choice, self._responder
        answered = choice.finish in (FinishReason.STOP, FinishReason.LENGTH)
        if self.closed or not (choice.started or answered):
            return b""
        events = b""
        if not self._opened:
            self._opened = True
            events += responder.opening(self.index)
            if self._echo is not None:
                events += responder.text(self.index, self._echo.text, self._logprobs(self._echo.placed(choice)))
        text, placed = choice.read(), self._placed()
        pieces = self._pieces(text or "", last=answered)
        # A token that shows nothing yet is an empty piece: whoever measures at the other end sees that it came.
        # While what may be a call is held back, only the choice's very first token is.
        held = self._told and self._scanner is not None and self._scanner.holding
        if not pieces and (placed or (text is not None and not answered and not held)):
            pieces = [""]
        self._told = self._told or bool(pieces)
        for piece in pieces:
            if isinstance(piece, ToolCall):
                events += responder.call(self.index, self._calls, piece)
                self._calls += 1
            else:
                events += responder.text(self.index, piece, self._logprobs(placed))
                placed = []
        if placed:
            events += responder.text(self.index, "", self._logprobs(placed))
        if answered:
            self.closed = True
            events += responder.closing(self.index, self._finish())
        return events

    # Whole ---------------------------------------------------------------------------------------------------

    def answer(self) -> Answer:
        """The whole choice, once it has finished."""
        pieces = self._pieces(self.choice.read() or "", last=True)
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        text, placed = "".join(piece for piece in pieces if isinstance(piece, str)), self._placed()
        if self._echo is not None:
            text, placed = self._echo.text + text, [*self._echo.placed(self.choice), *placed]
        self._calls = len(calls)
        return Answer(
            text=text,
            finish=self._finish(),
            logprobs=self._logprobs(placed),
            calls=[self._responder.called(self.index, number, call) for number, call in enumerate(calls)],
            prompt_logprobs=self._prompt_logprobs(),
        )

    # Parts ---------------------------------------------------------------------------------------------------

    def _pieces(self, text: str, *, last: bool) -> list[Piece]:
        if self._scanner is None:
            return [text] if text else []
        return [*self._scanner.push(text), *(self._scanner.flush() if last else [])]

    def _finish(self) -> str:
        """An answer that ends by itself and calls a tool ends for that."""
        return "tool_calls" if self._calls and self.choice.finish is FinishReason.STOP else str(self.choice.finish)

    def _placed(self) -> list[Placed]:
        """New log-probabilities, placed in the text that the client sees."""
        placed = self.choice.read_logprobs()
        if self._echo is None:
            return placed
        return [(entry, at + len(self._echo.text)) for entry, at in placed]

    def _logprobs(self, placed: list[Placed]) -> dict[str, Any] | None:
        if self._bodies is None:
            return None
        if isinstance(self._call, ChatCall):
            return self._bodies.chat(placed)
        return self._bodies.completion(placed, top=bool(self._call.params.logprobs))

    def _prompt_logprobs(self) -> list[Any] | None:
        if not self._call.shows_prompt_logprobs:
            return None
        return LogprobBodies(self._tokenizer).prompt(self.choice.source.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as part of the answer; `starts` says where in it each of its tokens begins."""

    text: str
    starts: list[int]

    @classmethod
    def of(cls, call: CompletionCall, choice: Choice, tokenizer: Tokenizer) -> Echo:
        """Of the prompt as it was given: a beginning of sequence that the tokenizer adds is no part of it."""
        given = call.prompts[choice.index // call.samples]
        reader = IncrementalDetokenizer(tokenizer, skip_special=False)
        text, starts = "", []
        for token in choice.prompt:
            starts.append(reader.position)
            text += reader.push([token])
        text += reader.flush()
        if not isinstance(given, str):
            return cls(text, starts)
        added = max(0, len(text) - len(given)) if text.endswith(given) else 0
        return cls(given, [max(0, start - added) for start in starts])

    def placed(self, choice: Choice) -> list[Placed]:
        """The prompt's tokens with their log-probabilities, where these were asked for."""
        entries = choice.source.prompt_logprobs
        return [
            (TokenLogprob(token_id=token, logprob=math.nan, rank=0) if entry is None else entry, start)
            for token, entry, start in zip(choice.prompt, entries, self.starts, strict=False)
        ]
