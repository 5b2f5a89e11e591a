"""Admin API of tenants and keys. Layer: service. Parses and answers; the service decides."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, Router, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.paging import LARGEST, Page
from controlplane.tenants import service
from controlplane.tenants.schemas import (
    CreatedKeyAnswer,
    KeyRequest,
    KeyView,
    TenantPatch,
    TenantRequest,
    TenantView,
)

BODY_LIMIT = 64 * 1024

Limit = Annotated[int, QueryParameter(ge=1, le=LARGEST, description="rows in this page")]
IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="idempotency-key", min_length=1, max_length=128, description="makes a repeated creation harmless"
    ),
]


class TenantController(Controller):
    """Tenants and the keys below them."""

    path = "/tenants"
    tags = ["tenants"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="listTenants", summary="List tenants, oldest first")
    async def list_tenants(
        self, session: NamedDependency[AsyncSession], after: FromQuery[str | None] = None, limit: Limit = 50
    ) -> Page[TenantView]:
        return await service.list_tenants(session, after=after, limit=limit)

    @post(operation_id="createTenant", summary="Create a tenant")
    async def create_tenant(
        self,
        session: NamedDependency[AsyncSession],
        data: JSONBody[TenantRequest],
        idempotency_key: IdempotencyKey = None,
    ) -> TenantView:
        return await service.create_tenant(
            session,
            slug=data.slug,
            name=data.name,
            allowed_models=data.allowed_models,
            priority=data.priority,
            idempotency_key=idempotency_key,
        )

    @get("/{slug:str}", operation_id="getTenant", summary="Show a tenant")
    async def get_tenant(self, session: NamedDependency[AsyncSession], slug: FromPath[str]) -> TenantView:
        return await service.get_tenant(session, slug)

    @patch("/{slug:str}", operation_id="changeTenant", summary="Change a tenant; what is left out stays")
    async def change_tenant(
        self, session: NamedDependency[AsyncSession], slug: FromPath[str], data: JSONBody[TenantPatch]
    ) -> TenantView:
        return await service.change_tenant(session, slug, data)

    @get("/{slug:str}/keys", operation_id="listKeys", summary="List a tenant's keys, oldest first")
    async def list_keys(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[KeyView]:
        return await service.list_keys(session, slug, after=after, limit=limit)

    @post("/{slug:str}/keys", operation_id="createKey", summary="Create a key; its text is shown once")
    async def create_key(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        data: JSONBody[KeyRequest],
        idempotency_key: IdempotencyKey = None,
    ) -> CreatedKeyAnswer:
        created = await service.create_key(
            session,
            tenant_slug=slug,
            name=data.name,
            allowed_models=data.allowed_models,
            expires_at=data.expires_at,
            idempotency_key=idempotency_key,
        )
        return CreatedKeyAnswer(key=created.plain.reveal(), view=created.view)


class KeyController(Controller):
    """Keys by their own id."""

    path = "/keys"
    tags = ["keys"]  # noqa: RUF012 - the framework's own attribute

    @get("/{key_id:str}", operation_id="getKey", summary="Show a key")
    async def get_key(self, session: NamedDependency[AsyncSession], key_id: FromPath[str]) -> KeyView:
        return await service.get_key(session, key_id)

    @delete(
        "/{key_id:str}",
        operation_id="revokeKey",
        summary="Revoke a key; it is refused everywhere within two seconds",
        status_code=200,
    )
    async def revoke_key(self, session: NamedDependency[AsyncSession], key_id: FromPath[str]) -> KeyView:
        return await service.revoke_key(session, key_id)


router = Router("/api/v1", route_handlers=[TenantController, KeyController], request_max_body_size=BODY_LIMIT)
