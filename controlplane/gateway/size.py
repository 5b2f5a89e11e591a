"""How much a request may use at worst, read from its body without a tokenizer.

Layer: service. Pure. A token of a text stands for at least one of its UTF-8 bytes, and JSON text is never shorter than
what it says, so the bytes of the members that become the prompt bound its tokens; what a chat template adds of its own
is bounded by a constant. For plain English that is about four times too much: what was not used is given back when the
engine has counted. Where the bound is in the way of a limit, a replica is asked to count (`counting`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from controlplane.admission.charges import MOST
from controlplane.errors import InvalidRequestError

TEMPLATE_TOKENS = 128
"""A chat template's own words: default system prompt, role marks. Per message they are fewer than the bytes of its
JSON braces and keys."""
TOOLS_TEMPLATE_TOKENS = 256
"""What a template says about tools, besides the tools."""
LONGEST_TOKEN = 128
"""Bytes; few vocabularies have a longer one."""
COMPLETION_OUTPUT = 16
"""OpenAI's default of `max_tokens` for /v1/completions."""
SIZE_KEYS = (
    "messages",
    "prompt",
    "suffix",
    "tools",
    "functions",
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
)
"""The members that decide how large a request is."""

_INTEGER = msgspec.json.Decoder(int)
_NUMBER = msgspec.json.Decoder(int | float)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class Size(msgspec.Struct, frozen=True, gc=False):
    """`prompt` bounds the tokens of all `prompts` together; each has `samples` answers of at most `output` tokens, None
    for as many as the context leaves.
    """

    prompt: int
    prompts: int
    samples: int
    output: int | None
    chat: bool
    """The prompt is `messages`."""
    exact: bool = False
    """`prompt` is the number of token ids, no bound."""
    unclear: str = ""
    """The member that tells the samples and is no whole number: nobody could say how many it means."""

    def input_tokens(self, context: int) -> int:
        """At most; `context` is the most a prompt can have."""
        return min(self.prompt, context * self.prompts, MOST)

    @property
    def least_input(self) -> int:
        """Hardly any prompt has fewer: below this it is not worth counting."""
        return self.prompt if self.exact else min(self.prompt // LONGEST_TOKEN, MOST)

    def output_tokens(self, context: int) -> int:
        """At most, in all answers together. Raises InvalidRequestError (400) when their number is unclear."""
        if self.unclear:
            raise InvalidRequestError(
                f"{self.unclear} must be a whole number.", code="invalid_type", param=self.unclear
            )
        each = context if self.output is None else min(self.output, context)
        return min(each * self.samples * self.prompts, MOST)


def read_size(members: Mapping[str, msgspec.Raw]) -> Size:
    """The size of a request with these members. A limit that is no whole number counts as none."""
    counts = {name: _count(members[name]) for name in ("n", "best_of") if name in members}
    unclear = next((name for name, count in counts.items() if count is None), "")
    samples = min(max((count or 1 for count in counts.values()), default=1), MOST)
    texts = sum(
        len(memoryview(members[name])) for name in ("messages", "suffix", "tools", "functions") if name in members
    )
    chat = "messages" in members
    if chat:
        texts += TEMPLATE_TOKENS
    if "tools" in members or "functions" in members:
        texts += TOOLS_TEMPLATE_TOKENS
    prompt, prompts, ids = _prompts(members["prompt"]) if "prompt" in members else (0, 1, False)
    output = _output(members, None if chat else COMPLETION_OUTPUT)
    exact = ids and not texts
    return Size(texts + prompt, prompts, max(1, samples), output, chat, exact=exact, unclear=unclear)


def _prompts(raw: msgspec.Raw) -> tuple[int, int, bool]:
    """Most tokens of a `prompt`, how many prompts it is, and whether these are token ids, so that the number is no
    bound: a text, texts, token ids, or lists of token ids.
    """
    text = bytes(raw)
    if not text.startswith(b"["):
        return len(text), 1, False
    items = _LIST.decode(text)
    first = bytes(items[0])[:1] if items else b""
    if first == b'"':
        return len(text), len(items), False
    if b'"' in text:  # of no shape that an engine takes
        return len(text), max(1, len(items)), False
    return text.count(b",") + 1, len(items) if first == b"[" else 1, True


def _count(raw: msgspec.Raw) -> int | None:
    if bytes(raw) == b"null":
        return 1
    try:
        return _INTEGER.decode(raw)
    except msgspec.DecodeError:
        return None


def _output(members: Mapping[str, msgspec.Raw], default: int | None) -> int | None:
    """The larger of the limits that the body sets, so that it holds whichever of them counts; None for no limit, which
    is what a negative one means to engines that do not refuse it. Written as 5.0 a limit is 5: an engine takes it so or
    refuses it, and never does more.
    """
    limits: list[int] = []
    for name in ("max_tokens", "max_completion_tokens"):
        raw = members.get(name)
        if raw is None or bytes(raw) == b"null":
            continue
        try:
            limit = _NUMBER.decode(raw)
        except msgspec.DecodeError:
            return None
        if limit < 0 or int(limit) != limit:
            return None
        limits.append(int(limit))
    return max(limits) if limits else default
