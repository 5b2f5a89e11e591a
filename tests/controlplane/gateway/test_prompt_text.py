"""The text of requests and answers: pieces of one text together, different texts apart, so that redaction sees both."""

from __future__ import annotations

import json

from controlplane.gateway.prompt_text import answer_of, prompt_of


def event(**delta: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


def call(index: int, text: str) -> dict[str, object]:
    return {"index": index, "function": {"arguments": text}}


def test_pieces_of_two_calls_that_come_in_turns_are_two_texts() -> None:
    stream = [
        event(tool_calls=[call(n % 2, piece)]) for n, piece in enumerate(["ada@exa", "4111 1111", "mple.com", " 1111"])
    ]
    assert answer_of(b"".join(stream), whole=True) == ("ada@example.com\n4111 1111 1111", False)


def test_what_was_thought_and_what_was_said_do_not_run_together() -> None:
    stream = event(reasoning_content="done") + event(content="sk-") + event(content="abc")
    assert answer_of(stream, whole=True)[0] == "done\nsk-abc"


def test_parts_of_a_message_do_not_run_together() -> None:
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url"}, {"type": "text", "text": "sk-abc"}]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    assert prompt_of(body)[0] == "user: what is\n(image_url)\nsk-abc"
