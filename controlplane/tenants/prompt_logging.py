"""Whether a tenant's prompts are kept, and how: stored with the tenant, so that gateways hear of a change at once.

Layer: service. What is kept is the promptlog domain's.
"""

from __future__ import annotations

from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.tenants import repository
from controlplane.tenants.lookup import no_tenant, tenant_of
from controlplane.tenants.schemas import PromptLogging
from controlplane.tenants.views import read_prompt_logging


async def prompt_logging(session: AsyncSession, slug: str) -> tuple[UUID, PromptLogging | None]:
    """The tenant's id and what it has asked for, None when nothing is kept. Raises NotFoundError."""
    tenant = await tenant_of(session, slug)
    return tenant.id, read_prompt_logging(tenant.prompt_log)


async def set_prompt_logging(session: AsyncSession, slug: str, wanted: PromptLogging | None) -> UUID:
    """Change it; returns the tenant's id. Raises NotFoundError."""
    stored = None if wanted is None else msgspec.to_builtins(wanted)
    tenant = await repository.change_tenant(session, slug, {"prompt_log": stored})
    if tenant is None:
        raise no_tenant(slug)
    return tenant.id
