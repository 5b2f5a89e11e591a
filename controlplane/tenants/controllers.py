"""Admin API of tenants, projects, principals and keys. Layer: service. Parses and answers; the services decide."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import msgspec
from litestar import Controller, Router, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.paging import LARGEST, Page
from controlplane.tenants import principals, projects, service
from controlplane.tenants.schemas import (
    CreatedKeyAnswer,
    KeyRequest,
    KeyView,
    PrincipalPatch,
    PrincipalRequest,
    PrincipalView,
    ProjectPatch,
    ProjectRequest,
    ProjectView,
    RotationRequest,
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
        return await service.create_tenant(session, **msgspec.structs.asdict(data), idempotency_key=idempotency_key)

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
            session, tenant_slug=slug, **msgspec.structs.asdict(data), idempotency_key=idempotency_key
        )
        return CreatedKeyAnswer(key=created.plain.reveal(), view=created.view)


class ProjectController(Controller):
    """Projects of a tenant."""

    path = "/tenants/{slug:str}/projects"
    tags = ["projects"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="listProjects", summary="List a tenant's projects, oldest first")
    async def list_projects(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[ProjectView]:
        return await projects.list_projects(session, slug, after=after, limit=limit)

    @post(operation_id="createProject", summary="Create a project")
    async def create_project(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        data: JSONBody[ProjectRequest],
        idempotency_key: IdempotencyKey = None,
    ) -> ProjectView:
        return await projects.create_project(
            session, slug, **msgspec.structs.asdict(data), idempotency_key=idempotency_key
        )

    @get("/{project:str}", operation_id="getProject", summary="Show a project")
    async def get_project(
        self, session: NamedDependency[AsyncSession], slug: FromPath[str], project: FromPath[str]
    ) -> ProjectView:
        return await projects.get_project(session, slug, project)

    @patch("/{project:str}", operation_id="changeProject", summary="Change a project; what is left out stays")
    async def change_project(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        project: FromPath[str],
        data: JSONBody[ProjectPatch],
    ) -> ProjectView:
        return await projects.change_project(session, slug, project, data)


class PrincipalController(Controller):
    """Principals of a tenant: people and service accounts."""

    path = "/tenants/{slug:str}/principals"
    tags = ["principals"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="listPrincipals", summary="List a tenant's principals, oldest first")
    async def list_principals(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        name: FromQuery[str | None] = None,
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[PrincipalView]:
        return await principals.list_principals(session, slug, name=name, after=after, limit=limit)

    @post(operation_id="createPrincipal", summary="Create a person or a service account")
    async def create_principal(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        data: JSONBody[PrincipalRequest],
        idempotency_key: IdempotencyKey = None,
    ) -> PrincipalView:
        return await principals.create_principal(
            session, slug, **msgspec.structs.asdict(data), idempotency_key=idempotency_key
        )

    @get("/{principal_id:uuid}", operation_id="getPrincipal", summary="Show a principal")
    async def get_principal(
        self, session: NamedDependency[AsyncSession], slug: FromPath[str], principal_id: FromPath[UUID]
    ) -> PrincipalView:
        return await principals.get_principal(session, slug, principal_id)

    @patch(
        "/{principal_id:uuid}",
        operation_id="changePrincipal",
        summary="Change a principal; what is left out stays",
    )
    async def change_principal(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        principal_id: FromPath[UUID],
        data: JSONBody[PrincipalPatch],
    ) -> PrincipalView:
        return await principals.change_principal(session, slug, principal_id, data)


class KeyController(Controller):
    """Keys by their own id."""

    path = "/keys"
    tags = ["keys"]  # noqa: RUF012 - the framework's own attribute

    @get("/{key_id:str}", operation_id="getKey", summary="Show a key")
    async def get_key(self, session: NamedDependency[AsyncSession], key_id: FromPath[str]) -> KeyView:
        return await service.get_key(session, key_id)

    @post(
        "/{key_id:str}/rotate",
        operation_id="rotateKey",
        summary="Replace a key by a new one of the same identity; both are valid for a grace period",
    )
    async def rotate_key(
        self,
        session: NamedDependency[AsyncSession],
        key_id: FromPath[str],
        data: JSONBody[RotationRequest],
        idempotency_key: IdempotencyKey = None,
    ) -> CreatedKeyAnswer:
        created = await service.rotate_key(session, key_id, grace_s=data.grace_s, idempotency_key=idempotency_key)
        return CreatedKeyAnswer(key=created.plain.reveal(), view=created.view)

    @delete(
        "/{key_id:str}",
        operation_id="revokeKey",
        summary="Revoke a key; it is refused everywhere within two seconds",
        status_code=200,
    )
    async def revoke_key(self, session: NamedDependency[AsyncSession], key_id: FromPath[str]) -> KeyView:
        return await service.revoke_key(session, key_id)


router = Router(
    "/api/v1",
    route_handlers=[TenantController, ProjectController, PrincipalController, KeyController],
    request_max_body_size=BODY_LIMIT,
)
