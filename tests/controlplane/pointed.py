"""A control plane in a process of its own, and an environment that points the CLI at it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts import service as accounts
from controlplane.accounts.schemas import Role
from controlplane.db import create_engine, transaction
from controlplane.settings import Settings
from tests.controlplane.test_serve import serving

TOKEN = "token-of-whoever-uses-the-cli-in-this-test"
Seeded = TypeVar("Seeded")


@contextmanager
def pointed(
    settings: Settings,
    patch: pytest.MonkeyPatch,
    seed: Callable[[AsyncSession], Awaitable[Seeded]],
    role: Role = Role.OPERATOR,
) -> Iterator[Seeded]:
    """The CLI speaks as `role`, with TOKEN. `seed` makes the rows that are there before, in one transaction."""

    async def rows() -> Seeded:
        engine = create_engine(settings, pooled=False)
        async with transaction(engine) as session:
            await accounts.ensure_api_token(session, role.value, TOKEN, role)
            made = await seed(session)
        await engine.dispose()
        return made

    made = asyncio.run(rows())
    with serving("control", settings) as (_, port):
        patch.setenv("TIDEGATE_CONTROL_URL", f"http://127.0.0.1:{port}")
        patch.setenv("TIDEGATE_ADMIN_TOKEN", TOKEN)
        yield made
