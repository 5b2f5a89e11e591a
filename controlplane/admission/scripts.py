"""The Lua scripts of leases, each one atomic over all keys of a tenant.

Layer: service. A script is a clock, `core.lua` and its own file, joined when it is loaded. Product code has one clock,
the server's, and no script takes a time from its caller; another clock makes another script.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

NAMES = ("acquire", "extend", "settle", "reassert", "hydrate", "peek", "reserved")


@cache
def source(name: str) -> str:
    """The text of `lua/<name>.lua`."""
    return resources.files("controlplane.admission").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def register(redis: Redis, clock: str | None = None) -> dict[str, AsyncScript]:
    """Every script by name. They are sent by their digest, and as text where the server does not know it."""
    head = (source("clock") if clock is None else clock) + source("core")
    return {name: redis.register_script(head + source(name)) for name in NAMES}
