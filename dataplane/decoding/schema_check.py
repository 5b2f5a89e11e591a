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
MOST_STEPS = 200_000
"""Places that one check may look at, each as often as it is referred to."""
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def check_schema(root: Schema) -> None:
    """Raises ValueError when texts outside `root` would be let through, or no text can ever end."""
    check = _Check(root)
    for place, schema in _walk(root, "#"):
        check.bounds(schema, place)
    if not check.finite(root):
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


class _Check:
    """One check of one schema, in bounded work."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = MOST_STEPS
        self._targets: dict[str, bool] | None = None

    def bounds(self, schema: Schema, place: str) -> None:
        """Raises ValueError when the bounds at one place would not be held."""
        for name in BOUNDS:
            bound = schema.get(name)
            if isinstance(bound, int) and not isinstance(bound, bool) and abs(bound) > LARGEST:
                raise ValueError(f"{name} at {place} is beyond 64 bits and cannot be enforced")
        if schema.get("type") == "integer" or not schema.keys() & {"allOf", *BOUNDS}:
            return
        low, above, high, below = -math.inf, False, math.inf, False
        for part in self._parts(schema):
            for name, out in (("minimum", False), ("exclusiveMinimum", True)):
                low, above = max((low, above), (_number(part, name, -math.inf), out))
            for name, out in (("maximum", False), ("exclusiveMaximum", True)):
                high, below = min(
                    (high, below), (_number(part, name, math.inf), out), key=lambda end: (end[0], not end[1])
                )
        drops_low = above and low >= 0 and low.is_integer() and high < low + 1
        drops_high = below and high <= 0 and high.is_integer() and low > high - 1
        if drops_low or drops_high:
            name = "exclusiveMinimum" if drops_low else "exclusiveMaximum"
            raise ValueError(f"{name} at {place} cannot be enforced: less than one lies between it and the other bound")

    def _parts(self, schema: Schema) -> Iterator[Schema]:
        """A schema and all that `allOf` and `$ref` add to it, each once."""
        seen, waiting = {id(schema)}, [schema]
        while waiting:
            self._step()
            part = waiting.pop()
            yield part
            every = part.get("allOf")
            for more in (*(every if isinstance(every, list) else ()), _target(self._root, part.get("$ref"))):
                if isinstance(more, dict) and id(more) not in seen:
                    seen.add(id(more))
                    waiting.append(more)

    def finite(self, schema: object) -> bool:
        """Whether some finite text may satisfy a schema. In doubt it may."""
        if self._targets is None:
            self._targets = self._fixed_point()
        return self._finite(schema, self._targets)

    def _fixed_point(self) -> dict[str, bool]:
        """Of every local reference, whether a finite text satisfies what it points at: the least fixed point."""
        refs = [ref for _, schema in _walk(self._root, "#") if isinstance(ref := schema.get("$ref"), str)]
        finite = dict.fromkeys(reversed(refs), False)  # the last are mostly the innermost
        changed = True
        while changed:
            changed = False
            for ref, known in finite.items():
                if not known and self._finite(_target(self._root, ref), finite):
                    finite[ref] = changed = True
        return finite

    def _finite(self, schema: object, refs: dict[str, bool]) -> bool:
        """The same, if the references that are True can be satisfied."""
        self._step()
        if not isinstance(schema, dict):
            return True
        every, some = schema.get("allOf"), [schema.get(name) for name in ("anyOf", "oneOf")]
        possible = refs.get(str(schema.get("$ref")), True)
        possible = possible and (not isinstance(every, list) or all(self._finite(part, refs) for part in every))
        for parts in some:
            if possible and isinstance(parts, list) and parts:
                possible = any(self._finite(part, refs) for part in parts)
        return possible and (
            "const" in schema or "enum" in schema or self._finite_kind(schema, schema.get("type"), refs)
        )

    def _finite_kind(self, schema: Schema, kind: object, refs: dict[str, bool]) -> bool:
        """The same of what its `type` alone asks for."""
        if isinstance(kind, list) and kind:
            return any(not isinstance(one, list) and self._finite_kind(schema, one, refs) for one in kind)
        if kind == "object":
            return self._finite_object(schema, refs)
        return kind != "array" or self._finite_array(schema, refs)

    def _finite_object(self, schema: Schema, refs: dict[str, bool]) -> bool:
        properties, required = schema.get("properties"), schema.get("required")
        named = properties if isinstance(properties, dict) else {}
        others = schema.get("additionalProperties", True)
        names = required if isinstance(required, list) else []
        return all(self._finite(named.get(name, others), refs) for name in names if isinstance(name, str))

    def _finite_array(self, schema: Schema, refs: dict[str, bool]) -> bool:
        least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        if not isinstance(least, int) or not isinstance(first, list):
            return True
        beyond = least <= len(first) or self._finite(schema.get("items", True), refs)
        return beyond and all(self._finite(item, refs) for item in first[: max(0, least)])

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("its references lead to too many places")


def _number(schema: Schema, name: str, otherwise: float) -> float:
    value = schema.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return otherwise
    return float(max(-LARGEST, min(LARGEST, value))) if isinstance(value, int) else value


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
