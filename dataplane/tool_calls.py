"""What of a model's text is a call to a tool.

Layer: service. Pure. Text goes in as it comes; text and whole calls come out, in order. Only what may be a call is
held back. What is none after all (broken JSON, a number that JSON does not have, a tool that was not offered) comes out
as the text it is, but for a call that the end of the answer cut off after others that are whole: it is of no use to
anybody, and is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from dataplane.tools import CLOSE, OPEN, ToolStyle, ToolUse

_DECODER = json.JSONDecoder()


class ToolCall(msgspec.Struct, frozen=True):
    """One call; `arguments` is JSON text."""

    name: str
    arguments: str


Piece = str | ToolCall


class ToolCallScanner:
    """Reads one answer."""

    def __init__(self, use: ToolUse, style: ToolStyle) -> None:
        self._names = frozenset(tool.name for tool in use.offered())
        self._most = sys.maxsize if use.parallel else 1
        self._bare = style is ToolStyle.BARE
        self._plain = False
        self._held = ""
        self._blank = ""
        self._inside = False
        self._after_call = False
        self.calls = 0
        """Calls found so far."""

    @property
    def holding(self) -> bool:
        """Text is held back that may be, or lie around, a call."""
        return self._inside or bool(self._held or self._blank)

    def push(self, text: str) -> list[Piece]:
        """What `text` makes certain."""
        self._held += text
        return self._bare_pieces() if self._bare else list(self._tagged_pieces())

    def flush(self) -> list[Piece]:
        """The rest, at the end of the answer: a call whose closing tag never came is one if it is whole."""
        held, self._held = self._held, ""
        if self._bare or self._inside:
            calls = self._calls(held, ended=True)
            if calls is not None:
                return calls
            if self.calls:
                return []
            text = self._blank + (OPEN if self._inside else "") + held
            return [text] if text else []
        # Outside of a call, what is held may begin its tag.
        text = self._blank + ("" if self._after_call else held)
        return [text] if text and not (self.calls and text.isspace()) else []

    # Tagged ----------------------------------------------------------------------------------------------------

    def _tagged_pieces(self) -> Iterable[Piece]:
        while True:
            if self._inside:
                body, mark, rest = self._held.partition(CLOSE)
                if not mark:
                    return
                self._held, self._inside = rest, False
                calls = self._calls(body)
                if calls is not None:
                    self._blank, self._after_call = "", True
                    yield from calls
                else:
                    yield from self._text(f"{OPEN}{body}{CLOSE}")
            else:
                before, mark, rest = self._held.partition(OPEN)
                if not mark:
                    keep = _overlap(self._held, OPEN)
                    before, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                    yield from self._text(before)
                    return
                yield from self._text(before)
                self._held, self._inside = rest, True

    def _text(self, text: str) -> Iterable[str]:
        """White space is kept until it is known that it is not what lies around a call."""
        shown = text.rstrip()
        if shown:
            yield self._blank + shown
            self._blank, self._after_call = text[len(shown) :], False
        else:
            self._blank += text

    # Bare ------------------------------------------------------------------------------------------------------

    def _bare_pieces(self) -> list[Piece]:
        """An answer is calls from its first character or not at all."""
        begun = self._held.lstrip()
        if not self._plain and (not begun or begun.startswith("{")):
            return []
        self._plain = True
        text, self._held = self._held, ""
        return [text] if text else []

    # Calls -----------------------------------------------------------------------------------------------------

    def _calls(self, text: str, *, ended: bool = False) -> list[Piece] | None:
        """The calls `text` consists of: one object, several, or a list of them, without those that are one too many.
        None when anything in it is no call. `ended`: the answer ended here, maybe within a call."""
        found: list[Piece] = []
        try:
            for value in _values(text, ended=ended):
                call = _call(value, self._names)
                if call is None:
                    return None
                found.append(call)
        except (ValueError, RecursionError):
            return None
        if not found:
            # SmolLM2 says so when it calls nothing; white space alone is text.
            return [] if text.strip() else None
        found = found[: self._most - self.calls]
        self.calls += len(found)
        return found


def _values(text: str, *, ended: bool) -> Iterable[Any]:
    """The JSON values one after the other, with white space or semicolons between them. Raises ValueError, but where
    the answer `ended` within what comes after a whole value."""
    at, whole = 0, False
    while True:
        while at < len(text) and text[at] in " \t\r\n;":
            at += 1
        if at == len(text):
            return
        try:
            value, at = _DECODER.raw_decode(text, at)
        except ValueError:
            if ended and whole and (text[at] in "{[" or CLOSE.startswith(text[at:])):
                return
            raise
        whole = True
        yield from value if isinstance(value, list) else [value]


def _call(value: Any, names: frozenset[str]) -> ToolCall | None:
    """None when it is no call. Raises ValueError when its arguments are no JSON: NaN, or a number beyond a double."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair, which the model may escape and UTF-8 cannot hold, stays escaped.
    return ToolCall(value["name"], text.encode("utf-8", "backslashreplace").decode())


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
