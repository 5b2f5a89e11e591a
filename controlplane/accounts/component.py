"""The accounts domain's part of the control plane. Layer: service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar import Litestar

from controlplane.accounts.controllers import router
from controlplane.accounts.passwords import Passwords
from controlplane.accounts.throttle import LoginThrottle
from controlplane.component import Component, Resources


def component(resources: Resources) -> Component:
    """Routes, and the password hasher and login throttle that `accounts.service` finds on the application."""
    passwords = Passwords()

    @asynccontextmanager
    async def close_passwords(_: Litestar) -> AsyncIterator[None]:
        yield
        passwords.close()

    return Component(
        routes=[router],
        lifespans=[close_passwords],
        state={"passwords": passwords, "login_throttle": LoginThrottle(resources.redis)},
    )
