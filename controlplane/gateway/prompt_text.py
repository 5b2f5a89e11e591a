"""The text of a request and of its answer, as people would read them.

Layer: service. Pure. What is not understood is left out rather than kept as it came: redaction works on text, and JSON
escapes would hide things from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

LARGEST_BODY = 256 * 1024
"""Longer requests are not read again for their text."""
MOST_PARTS = 2_000


def prompt_of(body: bytes) -> tuple[str, bool]:
    """The prompt, and whether something of it is missing."""
    if len(body) > LARGEST_BODY:
        return f"(a request of {len(body)} bytes)", True
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "(not readable)", True
    if not isinstance(asked, dict):
        return "(not readable)", True
    parts = [*_prompts(asked.get("prompt")), *_messages(asked.get("messages"))]
    return _clean("\n".join(parts[:MOST_PARTS])), len(parts) > MOST_PARTS


def answer_of(body: bytes, *, whole: bool) -> tuple[str, bool]:
    """The answer out of the bytes that a client was sent; `whole` says that they are all. Errors have no text."""
    choices: dict[int, list[tuple[str, str]]] = {}
    if body.lstrip().startswith(b"{"):
        events: Iterable[bytes] = [body]
    else:
        events = (line[5:] for line in body.splitlines() if line.startswith(b"data:"))
    for event in events:
        try:
            told = msgspec.json.decode(event)
        except (msgspec.DecodeError, RecursionError):
            continue
        for choice in _list(told.get("choices") if isinstance(told, dict) else None):
            if isinstance(choice, dict):
                index = choice.get("index")
                kept = choices.setdefault(index if isinstance(index, int) else 0, [])
                kept.extend(_texts(choice))
    texts = [_joined(choices[index]) for index in sorted(choices)]
    if len(texts) > 1:
        texts = [f"[{number}] {text}" for number, text in enumerate(texts)]
    return _clean("\n".join(texts)), not whole


def _prompts(prompt: Any) -> Iterator[str]:
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list):
        yield from (one if isinstance(one, str) else "(tokens)" for one in prompt[: MOST_PARTS + 1])


def _messages(messages: Any) -> Iterator[str]:
    for message in _list(messages)[: MOST_PARTS + 1]:
        if isinstance(message, dict):
            said = _joined(_texts({"message": message}))
            yield f"{message.get('role') or 'nobody'}: {said}"


def _texts(choice: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a choice, whole or a piece of a stream, says: its text, its reasoning and the arguments of its calls. Each
    comes with its place: pieces of one place belong together, those of two are different texts.
    """
    if isinstance(text := choice.get("text"), str):
        yield "text", text
    said = choice.get("message") or choice.get("delta")
    if not isinstance(said, dict):
        return
    for name in ("reasoning_content", "content", "refusal"):
        if text := _content(said.get(name)):
            yield name, text
    for number, call in enumerate(_list(said.get("tool_calls"))):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            index = call.get("index", number)
            for name in ("name", "arguments"):
                if isinstance(value := function.get(name), str) and value:
                    yield f"call {index}", value


def _joined(texts: Iterable[tuple[str, str]]) -> str:
    """Pieces of each place put together, and a line for each place."""
    places: dict[str, list[str]] = {}
    for place, text in texts:
        places.setdefault(place, []).append(text)
    return "\n".join("".join(pieces) for pieces in places.values())


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [part for part in _list(content) if isinstance(part, dict)]
    return "\n".join(
        text if isinstance(text := part.get("text"), str) else f"({part.get('type') or 'part'})" for part in parts
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _clean(text: str) -> str:
    """Without what no database text can hold."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
