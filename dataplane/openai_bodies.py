"""What a replica answers to an OpenAI client: bodies, stream chunks, usage.

Layer: service. Pure: values in, JSON bytes out. One `Responder` per HTTP request holds what all its chunks
share. It never decides when something is sent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dataplane.api_error import ApiError

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


class Responder:
    """Builds the bodies of one request.

    `show_null_usage`: the client itself asked for the usage chunk, so every other chunk says `usage: null`.
    """

    def __init__(self, *, response_id: str, model: str, created: int, chat: bool, show_null_usage: bool) -> None:
        self._chat = chat
        kind = "chat.completion" if chat else "text_completion"
        self._whole = {"id": response_id, "object": kind, "created": created, "model": model}
        self._chunk = {**self._whole, "object": "chat.completion.chunk" if chat else kind}
        self._null_usage: dict[str, Any] = {"usage": None} if show_null_usage else {}

    def opening(self, index: int) -> bytes:
        """The first event of a choice, which tells the role; empty for completions, which have none."""
        return self._choice(index, {"role": "assistant", "content": ""}, None) if self._chat else b""

    def text(self, index: int, text: str) -> bytes:
        """An event with new text of a choice."""
        return self._choice(index, {"content": text} if self._chat else text, None)

    def closing(self, index: int, finish: str) -> bytes:
        """The last event of a choice."""
        return self._choice(index, {} if self._chat else "", finish)

    def usage(self, figures: dict[str, Any]) -> bytes:
        """The usage event: no choices."""
        return event(_json({**self._chunk, "choices": [], "usage": figures}))

    def whole(self, choices: list[tuple[str, str]], figures: dict[str, Any]) -> bytes:
        """The body of a request that is not streamed; `choices` are (text, finish reason) in order."""
        return _json(
            {
                **self._whole,
                "choices": [self._whole_choice(index, text, finish) for index, (text, finish) in enumerate(choices)],
                "usage": figures,
            }
        )

    def _choice(self, index: int, content: dict[str, str] | str, finish: str | None) -> bytes:
        choice = {
            "index": index,
            "delta" if self._chat else "text": content,
            "logprobs": None,
            "finish_reason": finish,
        }
        return event(_json({**self._chunk, "choices": [choice], **self._null_usage}))

    def _whole_choice(self, index: int, text: str, finish: str) -> dict[str, Any]:
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        )
        return {"index": index, **content, "logprobs": None, "finish_reason": finish}


def model_body(model: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    """One entry of /v1/models; the context length is an extension of ours and vLLM's."""
    body: dict[str, Any] = {"id": model, "object": "model", "created": created, "owned_by": "tidegate"}
    if max_model_len is not None:
        body["max_model_len"] = max_model_len
    return body
