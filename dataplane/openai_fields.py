"""The fields of a client's JSON: what is known, what asks for nothing, and how a misfit is told.

Layer: service. Pure. Shared by the modules that read one part of a body each.
"""

from __future__ import annotations

import re
from typing import Any, Final

from dataplane.api_error import ApiError, invalid

NOTHING: Final = ()
"""No value of this parameter asks for nothing."""
LONGEST_NUMBER = 40
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` without those that are null, which is how a client leaves one out."""
    return {name: value for name, value in fields.items() if value is not None}


def refuse_unsupported(
    fields: dict[str, Any], unsupported: dict[str, tuple[Any, ...]], known: tuple[str, ...], prefix: str
) -> None:
    """Drop parameters that ask for nothing; refuse the rest of what is not supported or not known."""
    for name in [name for name in fields if name not in known]:
        value = fields.pop(name)
        if name not in unsupported:
            raise invalid(f"unknown parameter: {prefix}{name[:100]}", f"{prefix}{name[:100]}", "unknown_parameter")
        if not any(type(value) is type(neutral) and value == neutral for neutral in unsupported[name]):
            raise invalid(f"{prefix}{name} is not supported by this engine", f"{prefix}{name}", "unsupported_parameter")


def shaped(text: str) -> ApiError:
    """msgspec's sentence, with its path turned into `param`."""
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    sentence = _PATH.sub("", text).replace("`", "")
    missing = re.search(r"missing required field (\w+)", sentence)
    if missing:
        name = f"{path}.{missing.group(1)}".lstrip(".")
        return invalid(f"{name} is missing", name, "missing_parameter")
    return invalid(f"{path or 'body'}: {sentence[:1].lower()}{sentence[1:]}", path or None, "invalid_type")


def within(name: str, value: float, low: float, high: float) -> float:
    """`value`, or a refusal that names the bounds. NaN is outside every range."""
    if not low <= value <= high:
        raise invalid(f"{name} must be between {low:g} and {high:g}, got {shown(value)}", name)
    return value


def shown(value: float) -> str:
    """A refused number as it is, so that it differs from every bound; one of very many digits is cut."""
    text = repr(value).removesuffix(".0")
    return text if len(text) <= LONGEST_NUMBER else f"{text[:LONGEST_NUMBER]}… ({len(text)} characters)"


def an_object(value: Any, where: str) -> dict[str, Any]:
    """`value` without what is null, or a refusal."""
    if not isinstance(value, dict):
        raise invalid(f"{where} must be an object", where, "invalid_type")
    return given(value)


def a_string(fields: dict[str, Any], name: str, prefix: str) -> str:
    """The string `name` of `fields`, or a refusal."""
    if name not in fields:
        raise invalid(f"{prefix}{name} is missing", f"{prefix}{name}", "missing_parameter")
    if not isinstance(fields[name], str):
        raise invalid(f"{prefix}{name} must be a string", f"{prefix}{name}", "invalid_type")
    return str(fields[name])
