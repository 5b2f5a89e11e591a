"""The Lua scripts of leases, each one atomic over all keys of a tenant.

Layer: service. A script is a clock, `core.lua` and its own file, joined when it is loaded. Product code has one clock,
the server's, and no script takes a time from its caller; another clock makes another script.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import cache
from importlib import resources
from typing import Any, Protocol

from redis.asyncio import Redis

from controlplane.redis_pipe import ScriptPipe

NAMES = ("acquire", "extend", "settle", "reassert", "hydrate", "correct", "peek", "reserved")


@cache
def source(name: str) -> str:
    """The text of `lua/<name>.lua`."""
    return resources.files("controlplane.admission").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


class Script(Protocol):
    """One script of a store, redis-py's or the pipe's."""

    def __call__(self, keys: Sequence[str], args: Sequence[bytes]) -> Awaitable[Any]: ...


def script_of(store: ScriptPipe | Redis, text: str) -> Script:
    """A script of `store`, sent by its digest, and as text where the server does not know it."""
    return store.script(text) if isinstance(store, ScriptPipe) else store.register_script(text)


def register(store: ScriptPipe | Redis, clock: str | None = None) -> dict[str, Script]:
    """Every script by name."""
    head = (source("clock") if clock is None else clock) + source("core")
    return {name: script_of(store, head + source(name)) for name in NAMES}
