"""JSON schemas that the grammar engine would take and not hold to.

Layer: model algorithm. Pure. llguidance 1.9 refuses the keywords it does not know; these are values of those it does
know: bounds it drops or cuts off, and recursion that no finite text satisfies. What is refused here is refused in one
sentence that names the place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

Schema = dict[str, Any]
LARGEST = 2**63 - 1
MOST_STEPS = 60_000
"""Places that one check may look at, each as often as it is referred to."""
LOWER = (("minimum", False), ("exclusiveMinimum", True))
UPPER = (("maximum", False), ("exclusiveMaximum", True))
BOUNDS = frozenset({name for name, _ in (*LOWER, *UPPER)})
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with schemas by name; `LISTED` have lists of them and `SINGLE` one."""
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")


def check_schema(root: Schema) -> None:
    """Raises ValueError when texts outside `root` would be let through, or no text can ever end."""
    check = _Check(root)
    for place, schema in _walk(root, "#"):
        check.bounds(schema, place)
    if not check.finite(root):
        raise ValueError("it asks for itself again without end: no finite text is in it")


def _walk(schema: object, place: str) -> Iterator[tuple[str, Schema]]:
    """Every schema in a schema, with its place."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for name in NAMED:
        named = schema.get(name)
        for key, below in named.items() if isinstance(named, dict) else ():
            yield from _walk(below, f"{place}/{name}/{key}"[:200])
    for name in LISTED:
        for index, below in enumerate(_list(schema, name)):
            yield from _walk(below, f"{place}/{name}/{index}"[:200])
    for name in SINGLE:
        yield from _walk(schema.get(name), f"{place}/{name}"[:200])


def _list(schema: Schema, name: str) -> list[object]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


class _Check:
    """One check of one schema, in bounded work."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = MOST_STEPS
        self._targets: dict[str, bool] | None = None

    def bounds(self, schema: Schema, place: str) -> None:
        """Raises ValueError when the bounds at one place would not be held."""
        for name, _ in LOWER:
            self._within(schema, name, place, sign=1)
        for name, _ in UPPER:
            self._within(schema, name, place, sign=-1)
        if schema.keys() & {"allOf", "anyOf", "oneOf", *BOUNDS} and schema.get("type") != "integer":
            for parts in self._conjunctions(schema):
                _check_gap(parts, place)
        patterns = schema.get("patternProperties")
        for pattern in patterns.values() if isinstance(patterns, dict) else ():
            named = schema.get("properties")
            for one in named.values() if isinstance(named, dict) else ():
                if isinstance(one, dict) and isinstance(pattern, dict):
                    _check_gap([*self._parts(one), *self._parts(pattern)], place)

    def _within(self, schema: Schema, name: str, place: str, *, sign: int) -> None:
        """A bound that is cut off to 64 bits must not let anything in."""
        bound = schema.get(name)
        if isinstance(bound, int) and sign * bound > LARGEST:
            raise ValueError(f"{name} at {place} is beyond 64 bits and cannot be enforced")

    def _conjunctions(self, schema: Schema) -> Iterator[list[Schema]]:
        """The schemas that hold together at one place: those that always do, and these with each alternative."""
        always = list(self._parts(schema))
        yield always
        for part in always:
            for other in (*_list(part, "anyOf"), *_list(part, "oneOf")):
                if isinstance(other, dict):
                    yield [*always, *self._parts(other)]

    def _parts(self, schema: Schema) -> Iterator[Schema]:
        """A schema and all that `allOf` and `$ref` add to it, each once."""
        seen, waiting = {id(schema)}, [schema]
        while waiting:
            self._step()
            part = waiting.pop()
            yield part
            for more in (*_list(part, "allOf"), _target(self._root, part.get("$ref"))):
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
        finite = dict.fromkeys(self._innermost_first(), False)
        changed = True
        while changed:
            changed = False
            for ref, known in finite.items():
                if not known and self._finite(_target(self._root, ref), finite):
                    finite[ref] = changed = True
        return finite

    def _innermost_first(self) -> Iterable[str]:
        """Every reference, after those that its target holds, where they do not go in circles."""
        ordered: dict[str, None] = {}
        begun: set[str] = set()
        waiting = [iter(list(self._refs(self._root)))]
        opened = [""]
        while waiting:
            ref = next(waiting[-1], None)
            if ref is None:
                waiting.pop()
                ordered[opened.pop()] = None
            elif ref not in begun:
                begun.add(ref)
                opened.append(ref)
                waiting.append(iter(list(self._refs(_target(self._root, ref)))))
        del ordered[""]
        return ordered

    def _refs(self, schema: object) -> Iterator[str]:
        for _, below in _walk(schema, ""):
            self._step()
            if isinstance(ref := below.get("$ref"), str):
                yield ref

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
        if isinstance(schema.get("patternProperties"), dict):
            names = [name for name in names if isinstance(name, str) and name in named]
        return all(self._finite(named.get(name, others), refs) for name in names if isinstance(name, str))

    def _finite_array(self, schema: Schema, refs: dict[str, bool]) -> bool:
        least, rest = schema.get("minItems", 0), "additionalItems" if _list(schema, "items") else "items"
        if not isinstance(least, int):
            return True
        first = _list(schema, "items") or _list(schema, "prefixItems")
        beyond = least <= len(first) or self._finite(schema.get(rest, True), refs)
        return beyond and all(self._finite(item, refs) for item in first[: max(0, least)])

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("its references lead to too many places")


def _check_gap(parts: Iterable[Schema], place: str) -> None:
    """Raises ValueError when the engine would let an excluded bound in: less than one lies between it and the other."""
    low, above, high, below = -math.inf, False, math.inf, False
    for part in parts:
        for name, out in LOWER:
            low, above = max((low, above), (_bound(part, name, "minimum", -math.inf), out))
        for name, out in UPPER:
            end = (_bound(part, name, "maximum", math.inf), out)
            high, below = min((high, below), end, key=lambda each: (each[0], not each[1]))
    drops_low = above and low >= 0 and low.is_integer() and high < low + 1
    drops_high = below and high <= 0 and high.is_integer() and low > high - 1
    if drops_low or drops_high:
        name = "exclusiveMinimum" if drops_low else "exclusiveMaximum"
        raise ValueError(f"{name} at {place} cannot be enforced: less than one lies between it and the other bound")


def _bound(schema: Schema, name: str, plain: str, otherwise: float) -> float:
    """A bound as a number; `exclusive…: true`, as draft 4 has it, excludes the plain one."""
    value = schema.get(plain if schema.get(name) is True else name)
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
        elif isinstance(at, list) and name.isascii() and name.isdigit() and int(name) < len(at):
            at = at[int(name)]
        else:
            return True
    return at
