"""The seam through which a model's operations are noted instead of run.

Layer: kernel. Plain Python, torch-free. An operation whose first argument is a `Symbol` is handed to that symbol's
recorder under its own name, with its other arguments as they are; any other is run. So recording needs no switch that
could be left on: it goes on exactly as long as symbols do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

First = TypeVar("First")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


class Symbol:
    """A value of a step that is not there yet. `recorder` has a method for each operation that may take it."""

    __slots__ = ("recorder",)

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder


def recordable(
    operation: Callable[Concatenate[First, Rest], Result],
) -> Callable[Concatenate[First, Rest], Result]:
    """`operation`, noted by the recorder of its first argument where that is a symbol."""
    name = operation.__name__

    @wraps(operation)
    def run_or_note(first: First, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        if isinstance(first, Symbol):
            return getattr(first.recorder, name)(first, *args, **kwargs)  # type: ignore[no-any-return]
        return operation(first, *args, **kwargs)

    return run_or_note
