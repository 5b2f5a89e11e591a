"""What a client says of the form of the answer: OpenAI's `response_format`, vLLM's `structured_outputs`.

Layer: service. Pure. Whether a grammar is any good is found out by compiling it (`dataplane.grammar_check`).
"""

from __future__ import annotations

import json
from typing import Any

from dataplane.api_error import ApiError, invalid
from dataplane.openai_fields import a_string, an_object, refuse_unsupported
from dataplane.protocol import Grammar, GrammarKind

FORMAT, STRUCTURED = "response_format", "structured_outputs"
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_WITHOUT_EFFECT = {"disable_fallback": (False, True), "disable_any_whitespace": (False,)}


def read_grammar(response_format: Any, structured: Any) -> tuple[Grammar | None, str]:
    """The grammar of the answer and the parameter it came by; None leaves the answer free. Raises ApiError."""
    by_format = None if response_format is None else _format(an_object(response_format, FORMAT))
    if structured is None:
        return by_format, FORMAT
    if by_format is not None:
        raise invalid(f"{FORMAT} and {STRUCTURED} say both what the answer looks like; give one of them", STRUCTURED)
    return _structured(an_object(structured, STRUCTURED)), STRUCTURED


def _format(fields: dict[str, Any]) -> Grammar | None:
    kind = a_string(fields, "type", f"{FORMAT}.")
    if kind == "json_schema":
        refuse_unsupported(fields, {}, ("type", "json_schema"), f"{FORMAT}.")
        described = an_object(fields.get("json_schema"), f"{FORMAT}.json_schema")
        place = f"{FORMAT}.json_schema."
        refuse_unsupported(described, {}, ("name", "description", "schema", "strict"), place)
        a_string(described, "name", place)
        schema = an_object(described.get("schema"), f"{place}schema")
        return _schema(schema)
    refuse_unsupported(fields, {}, ("type",), f"{FORMAT}.")
    if kind == "json_object":
        return Grammar(kind=GrammarKind.JSON_OBJECT)
    if kind == "text":
        return None
    raise invalid(f"{FORMAT}.type must be 'text', 'json_object' or 'json_schema'", f"{FORMAT}.type")


def _structured(fields: dict[str, Any]) -> Grammar:
    refuse_unsupported(fields, _WITHOUT_EFFECT, _KINDS, f"{STRUCTURED}.")
    if fields.get("json_object") is False:
        del fields["json_object"]
    if len(fields) != 1:
        raise invalid(f"{STRUCTURED} takes exactly one of {', '.join(_KINDS)}", STRUCTURED)
    ((kind, value),) = fields.items()
    if kind == "json":
        return (
            _schema(value)
            if isinstance(value, dict)
            else Grammar(kind=GrammarKind.JSON_SCHEMA, text=_text(kind, value))
        )
    if kind == "json_object":
        if value is not True:
            raise _misfit(kind, "a boolean")
        return Grammar(kind=GrammarKind.JSON_OBJECT)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise _misfit(kind, "a list of at least one string")
        return Grammar(kind=GrammarKind.CHOICE, text=json.dumps(value, ensure_ascii=False))
    return Grammar(kind=GrammarKind.REGEX if kind == "regex" else GrammarKind.EBNF, text=_text(kind, value))


def _schema(schema: dict[str, Any]) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema, ensure_ascii=False))


def _text(kind: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _misfit(kind, "a string")
    return value


def _misfit(kind: str, wanted: str) -> ApiError:
    return invalid(f"{STRUCTURED}.{kind} must be {wanted}", f"{STRUCTURED}.{kind}", "invalid_type")
