"""The messages of a chat and the tools that come with it.

Layer: service. Pure: decoded JSON in, what the chat template and the tool modules take out, or an ApiError.
"""

from __future__ import annotations

import json
import re
from typing import Any

from dataplane.api_error import invalid
from dataplane.openai_fields import NOTHING, a_string, an_object, given, refuse_unsupported
from dataplane.tools import Tool, ToolUse

MAX_MESSAGES = 2048
MAX_TOOLS = 128
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Accepted roles and the role the chat template sees."""

_IGNORABLE: dict[str, tuple[Any, ...]] = {
    "name": NOTHING,
    "refusal": NOTHING,
    "audio": NOTHING,
    "annotations": ([],),
    "function_call": NOTHING,
    "tool_calls": ([],),
    "tool_call_id": NOTHING,
}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`{"role", "content"}` and, where they belong, `tool_calls` and `tool_call_id`. Raises ApiError."""
    if not messages:
        raise invalid("messages must hold at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid(f"messages must hold at most {MAX_MESSAGES} messages, got {len(messages)}", "messages")
    return [_message(f"messages[{index}].", given(message)) for index, message in enumerate(messages)]


def _message(prefix: str, fields: dict[str, Any]) -> dict[str, Any]:
    role = fields.get("role")
    if role is None:
        raise invalid(f"{prefix}role is missing", f"{prefix}role", "missing_parameter")
    if role == "function":
        raise invalid("role 'function' is not supported by this engine", f"{prefix}role", "unsupported_parameter")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{prefix}role must be one of {', '.join(ROLES)}", f"{prefix}role")
    own = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}.get(role, ())
    refuse_unsupported(fields, _IGNORABLE, ("role", "content", *own), prefix)
    message: dict[str, Any] = {"role": ROLES[role], "content": ""}
    if role == "tool":
        message["tool_call_id"] = a_string(fields, "tool_call_id", prefix)
    if fields.get("tool_calls"):
        message["tool_calls"] = _calls(fields["tool_calls"], f"{prefix}tool_calls")
    if "content" in fields:
        message["content"] = _content(fields["content"], f"{prefix}content")
    elif "tool_calls" not in message:
        raise invalid(f"{prefix}content is missing", f"{prefix}content", "missing_parameter")
    return message


def _content(content: Any, where: str) -> str:
    """Content as one string; a list of text parts is joined as it stands."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(f"{where} must be a string or a list of text parts", where, "invalid_type")
    texts: list[str] = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise invalid(f'{place} must be {{"type": "text", "text": …}}', place, "invalid_type")
        if kind != "text":
            sentence = f"content of type {kind[:50]!r} is not supported by this engine"
            raise invalid(sentence, place, "unsupported_parameter")
        texts.append(a_string(part, "text", f"{place}."))
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Earlier calls, with their arguments decoded, as chat templates take them."""
    if not isinstance(calls, list):
        raise invalid(f"{where} must be a list", where, "invalid_type")
    found: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        place = f"{where}[{number}]."
        fields = an_object(call, place[:-1])
        refuse_unsupported(fields, {"index": (number,)}, ("id", "type", "function"), place)
        if fields.get("type", "function") != "function":
            raise invalid(f"{place}type must be 'function'", f"{place}type", "unsupported_parameter")
        function = an_object(fields.get("function"), f"{place}function")
        refuse_unsupported(function, {}, ("name", "arguments"), f"{place}function.")
        text = a_string(function, "arguments", f"{place}function.")
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            sentence = f"{place}function.arguments must be a JSON object as a string"
            raise invalid(sentence, f"{place}function.arguments")
        name = a_string(function, "name", f"{place}function.")
        found.append(
            {
                "id": a_string(fields, "id", place),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
    return found


def read_tools(tools: list[Any], choice: Any, parallel: bool) -> ToolUse:
    """What the request says of tools; nothing when it has none or wants none. Raises ApiError."""
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools may hold at most {MAX_TOOLS} tools, got {len(tools)}", "tools")
    known = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = {tool.name for tool in known}
    if len(names) < len(known):
        raise invalid("two tools have the same name", "tools")
    if isinstance(choice, dict):
        fields = an_object(choice, "tool_choice")
        function = an_object(fields.get("function"), "tool_choice.function")
        name = a_string(function, "name", "tool_choice.function.")
        if fields.get("type") != "function" or set(fields) - {"type", "function"} or set(function) - {"name"}:
            raise invalid('tool_choice must be {"type": "function", "function": {"name": …}}', "tool_choice")
        if name not in names:
            raise invalid(f"tool_choice names {name[:64]!r}, which is not among the tools", "tool_choice")
        return ToolUse(tools=known, choice=name, named=True, parallel=False)
    if choice not in ("none", "auto", "required"):
        raise invalid("tool_choice must be 'none', 'auto', 'required' or an object naming a tool", "tool_choice")
    if choice == "required" and not known:
        raise invalid("tool_choice is 'required' and there are no tools", "tool_choice")
    return ToolUse() if choice == "none" else ToolUse(tools=known, choice=choice, parallel=parallel)


def _tool(tool: Any, where: str) -> Tool:
    fields = an_object(tool, where)
    kind = a_string(fields, "type", f"{where}.")
    if kind != "function":
        sentence = f"tools of type {kind[:50]!r} are not supported by this engine"
        raise invalid(sentence, f"{where}.type", "unsupported_parameter")
    refuse_unsupported(fields, {}, ("type", "function"), f"{where}.")
    function = an_object(fields.get("function"), f"{where}.function")
    place = f"{where}.function."
    refuse_unsupported(function, {}, ("name", "description", "parameters", "strict"), place)
    name = a_string(function, "name", place)
    if not _NAME.fullmatch(name):
        raise invalid(f"{place}name must be 1 to 64 letters, digits, underscores and dashes", f"{place}name")
    strict = function.get("strict", False)
    if not isinstance(strict, bool):
        raise invalid(f"{place}strict must be a boolean", f"{place}strict", "invalid_type")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{place}parameters must be a JSON schema", f"{place}parameters", "invalid_type")
    description = a_string({"description": "", **function}, "description", place)
    return Tool(name, description, parameters or None, strict)
