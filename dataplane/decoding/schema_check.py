"""JSON schemas that the grammar engine would take and not hold to.

Layer: model algorithm. Pure. llguidance 1.9 refuses the keywords it does not know; these are values of those it does
know: bounds it drops or cuts off, and recursion that no finite text satisfies. What is refused here is refused in one
sentence that names the place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
LARGEST = 2**63 - 1
DEEPEST_REF = 16
"""References followed from one place when its bounds are read."""
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def check_schema(root: Schema) -> None:
    """Raises ValueError when texts outside `root` would be let through, or no text can ever end."""
    for place, schema in _walk(root, "#"):
        _check_bounds(schema, root, place)
    if not _finite(root, _finite_targets(root)):
        raise ValueError("it asks for itself again without end: no finite text is in it")


def _walk(value: object, place: str) -> Iterator[tuple[str, Schema]]:
    """Every object in a schema with its place; what only looks like a schema does no harm."""
    if isinstance(value, dict):
        yield place, value
        for name, below in value.items():
            if name not in ("const", "enum", "default", "examples"):
                yield from _walk(below, f"{place}/{name}"[:200])
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _walk(below, f"{place}/{index}"[:200])


def _check_bounds(schema: Schema, root: Schema, place: str) -> None:
    for name in BOUNDS:
        bound = schema.get(name)
        if isinstance(bound, int) and not isinstance(bound, bool) and abs(bound) > LARGEST:
            raise ValueError(f"{name} at {place} is beyond 64 bits and cannot be enforced")
    if schema.get("type") == "integer":
        return
    low, high, above, below = _bounds(schema, root, DEEPEST_REF)
    drops_low = above and low >= 0 and low == math.floor(low) and high < low + 1
    drops_high = below and high <= 0 and high == math.floor(high) and low > high - 1
    if drops_low or drops_high:
        name = "exclusiveMinimum" if drops_low else "exclusiveMaximum"
        raise ValueError(f"{name} at {place} cannot be enforced: less than one lies between it and the other bound")


def _bounds(schema: object, root: Schema, refs: int) -> tuple[float, float, bool, bool]:
    """(low, high, whether low is excluded, whether high is), with what `allOf` and `$ref` add."""
    low, high, above, below = -math.inf, math.inf, False, False
    if not isinstance(schema, dict):
        return low, high, above, below
    parts = [(_number(schema, "minimum", -math.inf), math.inf, False, False)]
    parts.append((_number(schema, "exclusiveMinimum", -math.inf), math.inf, True, False))
    parts.append((-math.inf, _number(schema, "maximum", math.inf), False, False))
    parts.append((-math.inf, _number(schema, "exclusiveMaximum", math.inf), False, True))
    if refs:
        every = schema.get("allOf")
        parts += [_bounds(part, root, refs - 1) for part in every] if isinstance(every, list) else []
        parts.append(_bounds(_target(root, schema.get("$ref")), root, refs - 1))
    for one_low, one_high, one_above, one_below in parts:
        if one_low > low or (one_low == low and one_above):
            low, above = one_low, one_above and one_low > -math.inf
        if one_high < high or (one_high == high and one_below):
            high, below = one_high, one_below and one_high < math.inf
    return low, high, above, below


def _number(schema: Schema, name: str, otherwise: float) -> float:
    value = schema.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


# ------------------------------------------------------------------------------------------------------------ recursion


def _finite_targets(root: Schema) -> dict[str, bool]:
    """Of every local reference, whether a finite text satisfies what it points at: the least fixed point."""
    refs = {ref for _, schema in _walk(root, "#") if isinstance(ref := schema.get("$ref"), str)}
    finite = dict.fromkeys(refs, False)
    changed = True
    while changed:
        changed = False
        for ref, known in finite.items():
            if not known and _finite(_target(root, ref), finite):
                finite[ref] = changed = True
    return finite


def _finite(schema: object, refs: dict[str, bool]) -> bool:
    """Whether some finite text may satisfy a schema, if the references that are True may. In doubt it may."""
    if not isinstance(schema, dict):
        return True
    every, some = schema.get("allOf"), [schema.get(name) for name in ("anyOf", "oneOf")]
    possible = refs.get(str(schema.get("$ref")), True)
    possible = possible and (not isinstance(every, list) or all(_finite(part, refs) for part in every))
    for parts in some:
        possible = possible and (not isinstance(parts, list) or not parts or any(_finite(part, refs) for part in parts))
    return possible and ("const" in schema or "enum" in schema or _finite_kind(schema, schema.get("type"), refs))


def _finite_kind(schema: Schema, kind: object, refs: dict[str, bool]) -> bool:
    """The same of what its `type` alone asks for."""
    if isinstance(kind, list) and kind:
        return any(_finite_kind(schema, one, refs) for one in kind)
    if kind == "object":
        return _finite_object(schema, refs)
    return kind != "array" or _finite_array(schema, refs)


def _finite_object(schema: Schema, refs: dict[str, bool]) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    named = properties if isinstance(properties, dict) else {}
    others = schema.get("additionalProperties", True)
    names = required if isinstance(required, list) else []
    return all(_finite(named.get(name, others) if isinstance(name, str) else True, refs) for name in names)


def _finite_array(schema: Schema, refs: dict[str, bool]) -> bool:
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    if not isinstance(least, int) or not isinstance(first, list):
        return True
    beyond = least <= len(first) or _finite(schema.get("items", True), refs)
    return beyond and all(_finite(item, refs) for item in first[:least])


def _target(root: Schema, ref: object) -> object:
    """What a local reference points at; True, which anything satisfies, where it points nowhere."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return True
    at: object = root
    for part in ref[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict) and name in at:
            at = at[name]
        elif isinstance(at, list) and name.isdigit() and int(name) < len(at):
            at = at[int(name)]
        else:
            return True
    return at
