"""A function in a process of its own, for what is measured of a process as a whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def in_a_fresh_process(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """What a module's own `function` returns or raises there: whatever ran here before has left nothing in it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        return processes.submit(function, *args, **kwargs).result()
