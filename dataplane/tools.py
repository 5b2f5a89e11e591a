"""Tools: how a model is told of them and held to them.

Layer: service. Pure. A `ToolStyle` is the way a model writes calls, read off its chat template:
- TAGS: `<tool_call>` `{"name": …, "arguments": {…}}` `</tool_call>`, as Hermes, Qwen2.5 and SmolLM2 write them;
  also what a model whose template knows no tools is taught in the system message
- BARE: the whole answer is `{"name": …, "parameters": {…}}`, as Llama 3 writes it
What of an answer is a call is found by `dataplane.tool_calls`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from dataplane.protocol import Grammar, GrammarKind

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NOTHING_ASKED = {"type": "object", "additionalProperties": False}
"""The arguments of a tool without `parameters`."""
STRICT_JSON = {"lenient": False, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}"}
"""How the grammar reads a tool's schema: as `dataplane.decoding.grammar` reads every other."""


class ToolStyle(enum.StrEnum):
    """How a model writes calls. UNTAUGHT writes them as TAGS does, once it is told how."""

    TAGS = "tags"
    BARE = "bare"
    UNTAUGHT = "untaught"
    UNKNOWN = "unknown"
    """The template takes tools and has calls written in a way that is not understood here."""

    @property
    def arguments(self) -> str:
        """The name of the arguments in a call."""
        return "parameters" if self is ToolStyle.BARE else "arguments"


class Tool(msgspec.Struct, frozen=True):
    """A function the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """As OpenAI's API and every chat template write it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class ToolUse(msgspec.Struct, frozen=True):
    """What a request says of tools. `choice` is "auto", "required" or the name of the tool to call."""

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    named: bool = False
    """`choice` is a tool's name."""
    parallel: bool = True
    """More than one call may be made."""

    def offered(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if tool.name == self.choice) if self.named else self.tools

    @property
    def must(self) -> bool:
        """The answer has to be a call."""
        return self.named or self.choice == "required"


# Into the prompt -------------------------------------------------------------------------------------------------


def style_of(source: str, *, takes_tools: bool) -> ToolStyle:
    """The style a chat template's source shows; `takes_tools`: it has a variable of that name."""
    if not takes_tools:
        return ToolStyle.UNTAUGHT
    if OPEN in source and '"arguments"' in source.replace("\\", ""):
        return ToolStyle.TAGS
    if '"parameters"' in source.replace("\\", ""):
        return ToolStyle.BARE
    return ToolStyle.UNKNOWN


def taught(messages: Sequence[dict[str, Any]], use: ToolUse) -> list[dict[str, Any]]:
    """`messages` for a template that knows no tools: calls and results become text, and a system message explains."""
    lines = "\n".join(json.dumps(tool.described(), ensure_ascii=False) for tool in use.offered())
    lesson = (
        f"You can call these functions:\n<tools>\n{lines}\n</tools>\n"
        f'To call one, write {OPEN}\n{{"name": "its name", "arguments": {{…}}}}\n{CLOSE}\n'
        "and nothing after it; the result comes within <tool_response></tool_response>."
    )
    plain = [_as_text(message) for message in messages]
    if not use.tools:
        return plain
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{lesson}"}, *plain[1:]]
    return [{"role": "system", "content": lesson}, *plain]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
    return {"role": message["role"], "content": "\n".join([message["content"], *written]).strip()}


# Into the grammar ------------------------------------------------------------------------------------------------


def call_grammar(use: ToolUse, style: ToolStyle) -> Grammar | None:
    """The grammar that holds the answer to a call where one must come, and to the schemas of strict tools; None where
    the model may write what it likes."""
    offered = use.offered()
    if not use.must and not any(tool.strict for tool in offered):
        return None
    rules = [
        _call_rule(number, tool, style, anywhere=not use.must, held=use.must or tool.strict)
        for number, tool in enumerate(offered)
    ]
    names = " | ".join(f"call_{number}" for number in range(len(offered)))
    several = ' ("; " call)*' if style is ToolStyle.BARE else ' ("\\n" call)*'
    first = f"call{several if use.parallel else ''}"
    if use.must:
        head = [f"start: {first}", f"call: {names}"]
    elif style is ToolStyle.BARE:
        head = ["%llguidance {}", f"start: {first} | TEXT", r"TEXT: /([^{](.|\n)*)?/", f"call: {names}"]
    else:
        head = ["%llguidance {}", "start: call* TEXT", r"TEXT: /(.|\n)*/", f"call: {names}"]
        head.append(f'opened[lazy]: TEXT "{OPEN}"')
    return Grammar(kind=GrammarKind.EBNF, text="\n".join([*head, *rules]) + "\n")


def _call_rule(number: int, tool: Tool, style: ToolStyle, *, anywhere: bool, held: bool) -> str:
    """Lark: the call of one tool. `anywhere`: text may come before; `held`: its schema counts.

    Each schema is a grammar of its own, so that its references find their targets.
    """
    head = f'{{"name": {json.dumps(tool.name)}, "{style.arguments}": '
    if style is ToolStyle.BARE:
        begin, end = _lark(head), _lark("}")
    elif anywhere:
        begin, end = f"opened {_lark(chr(10) + head)}", _lark(f"}}\n{CLOSE}")
    else:
        begin, end = _lark(f"{OPEN}\n{head}"), _lark(f"}}\n{CLOSE}")
    schema = {**((tool.parameters or NOTHING_ASKED) if held else {"type": "object"}), "x-guidance": STRICT_JSON}
    arguments = json.dumps(schema, ensure_ascii=False)
    return f"call_{number}: {begin} arguments_{number} {end}\narguments_{number}: %json {arguments}"


def _lark(text: str) -> str:
    """A string of the Lark language."""
    return json.dumps(text, ensure_ascii=False)
