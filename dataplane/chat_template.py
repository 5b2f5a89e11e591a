"""A model's chat template: messages to prompt text.

Layer: service. Templates come out of model files, so they run in Jinja's immutable sandbox, without loader,
file or attribute access to anything but the messages; what a template raises becomes a RequestError.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2 import meta as jinja_meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dataplane.errors import CheckpointError
from dataplane.request import RequestError
from dataplane.tools import ToolStyle, style_of

MAX_RENDERED = 16 * 2**20


class TemplateRefusalError(TemplateError):
    """The template called `raise_exception`."""


class ChatTemplate:
    """A compiled template; `tokens` are the names of special tokens it may use (bos_token, eos_token …)."""

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
            variables = jinja_meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise CheckpointError(f"the chat template cannot be compiled: {error}") from error
        self._tokens = tokens
        self.tool_style: ToolStyle = style_of(source, takes_tools="tools" in variables)
        """How the model writes calls to tools."""

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The prompt text. Raises RequestError naming `messages` when the template refuses or fails on them."""
        try:
            text = self._template.render(messages=messages, **{**self._tokens, **variables})
        except TemplateRefusalError as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        except Exception as error:  # a template is foreign code: whatever it raises is about these messages
            raise RequestError(f"the chat template fails on these messages: {error}", param="messages") from error
        if len(text) > MAX_RENDERED:
            raise RequestError("the messages make too long a prompt", "context_length_exceeded", "messages")
        return text


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    """Plain JSON, as Hugging Face's templates expect; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)
