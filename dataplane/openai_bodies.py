"""What a replica answers to an OpenAI client: bodies, stream chunks, usage.

Layer: service. Pure: values in, JSON bytes out. One `Responder` per HTTP request holds what all its chunks
share. It never decides when something is sent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dataplane.api_error import ApiError
from dataplane.protocol import CoreReady
from dataplane.tool_calls import ToolCall

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


def event(body: bytes) -> bytes:
    """One server-sent event. JSON has no raw newline, so one `data:` line carries it whole."""
    return b"data: " + body + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event that ends a stream which cannot go on."""
    return event(error.body())


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's CompletionUsage; cached tokens are always stated."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One whole choice."""

    text: str
    finish: str
    logprobs: dict[str, Any] | None = None
    calls: list[dict[str, Any]] = []
    prompt_logprobs: list[Any] | None = None


class Responder:
    """Builds the bodies of one request.

    `show_null_usage`: the client itself asked for the usage chunk, so every other chunk says `usage: null`.
    """

    def __init__(self, *, response_id: str, model: str, created: int, chat: bool, show_null_usage: bool) -> None:
        self._id = response_id
        self._chat = chat
        kind = "chat.completion" if chat else "text_completion"
        self._whole = {"id": response_id, "object": kind, "created": created, "model": model}
        self._chunk = {**self._whole, "object": "chat.completion.chunk" if chat else kind}
        self._null_usage: dict[str, Any] = {"usage": None} if show_null_usage else {}

    def opening(self, index: int) -> bytes:
        """The first event of a choice, which tells the role; empty for completions, which have none."""
        return self._choice(index, {"role": "assistant", "content": ""}, None) if self._chat else b""

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        """An event with new text of a choice."""
        return self._choice(index, {"content": text} if self._chat else text, None, logprobs)

    def call(self, index: int, number: int, call: ToolCall) -> bytes:
        """An event with a choice's call to a tool, the `number`-th."""
        return self._choice(index, {"tool_calls": [{"index": number, **self.called(index, number, call)}]}, None)

    def closing(self, index: int, finish: str) -> bytes:
        """The last event of a choice."""
        return self._choice(index, {} if self._chat else "", finish)

    def usage(self, figures: dict[str, Any]) -> bytes:
        """The usage event: no choices."""
        return event(_json({**self._chunk, "choices": [], "usage": figures}))

    def whole(self, answers: list[Answer], figures: dict[str, Any]) -> bytes:
        """The body of a request that is not streamed; `answers` in the order of their choices."""
        body = {
            **self._whole,
            "choices": [self._whole_choice(index, answer) for index, answer in enumerate(answers)],
            "usage": figures,
        }
        if self._chat and answers[0].prompt_logprobs is not None:
            # A chat has one prompt, and vLLM tells of it beside the choices.
            body["prompt_logprobs"] = answers[0].prompt_logprobs
        return _json(body)

    def called(self, index: int, number: int, call: ToolCall) -> dict[str, Any]:
        """A call as OpenAI writes it."""
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self._id}-{index}-{number}", "type": "function", "function": function}

    def _choice(
        self, index: int, content: dict[str, Any] | str, finish: str | None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {
            "index": index,
            "delta" if self._chat else "text": content,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        return event(_json({**self._chunk, "choices": [choice], **self._null_usage}))

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": answer.logprobs, "finish_reason": answer.finish}
        if not self._chat:
            shown = {} if answer.prompt_logprobs is None else {"prompt_logprobs": answer.prompt_logprobs}
            return {**choice, "text": answer.text, **shown}
        content = answer.text if answer.text or not answer.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.calls:
            message["tool_calls"] = answer.calls
        return {**choice, "message": message}


def model_body(model: str, created: int, ready: CoreReady | None) -> dict[str, Any]:
    """One entry of /v1/models. The context length is an extension of ours and vLLM's; how it is run is ours."""
    body: dict[str, Any] = {"id": model, "object": "model", "created": created, "owned_by": "tidegate"}
    if ready is not None:
        body["max_model_len"] = ready.max_model_len
        told = {"forward": ready.forward, "kernel_tier": ready.kernel_tier, "weights": ready.weights}
        body |= {name: value for name, value in told.items() if value}
    return body
