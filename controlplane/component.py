"""How a domain plugs into the application.

Layer: service. `app.py` builds the shared resources, asks each domain of the process's role for its
component, and composes them; no domain reaches into another's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from litestar import Litestar
from litestar.types import ASGIApp
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.settings import Settings

Lifespan = Callable[[Litestar], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Resources:
    """What every domain of one process shares. Owned, opened and closed by `app.py`."""

    settings: Settings
    engine: AsyncEngine
    redis: Redis
    registry: CollectorRegistry


@dataclass(frozen=True, slots=True)
class Component:
    """A domain's routes (controllers or routers) and the lifespans that start and stop its background work."""

    routes: list[Any] = field(default_factory=list)
    lifespans: list[Lifespan] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    """Put on `app.state` under these names before the first request."""
    direct: tuple[str, ASGIApp] | None = None
    """A path that ends with a slash, and the ASGI application that serves all below it by itself, errors too."""
