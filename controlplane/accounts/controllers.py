"""Admin API of accounts: who am I, users and admin tokens. Layer: service. Parses and answers; the service decides."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from litestar import Controller, Router, delete, get, patch, post
from litestar.datastructures import State
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts import service
from controlplane.accounts.passwords import Passwords
from controlplane.accounts.schemas import ApiTokenView, Principal, Role, UserPatch, UserView
from controlplane.paging import LARGEST, Page

BODY_LIMIT = 64 * 1024
Limit = Annotated[int, QueryParameter(ge=1, le=LARGEST, description="rows in this page")]


class ApiTokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new admin token."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200, examples=["ci"])]
    role: Role = Role.VIEWER
    expires_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class UserRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new user."""

    email: Annotated[str, msgspec.Meta(min_length=3, max_length=254, examples=["ada@example.com"])]
    password: Annotated[str, msgspec.Meta(max_length=1024, description="at least 12 characters")]
    role: Role = Role.VIEWER


class CreatedApiToken(msgspec.Struct, frozen=True, kw_only=True):
    """`token` is shown this once."""

    token: str
    view: ApiTokenView


@get("/api/v1/me", operation_id="whoami", tags=["accounts"], summary="Whose token is this?")
async def whoami(current_user: NamedDependency[Principal]) -> Principal:
    return current_user


class UserController(Controller):
    """Who may log in to the console."""

    path = "/api/v1/users"
    tags = ["accounts"]  # noqa: RUF012 - the framework's own attribute
    request_max_body_size = BODY_LIMIT

    @get(operation_id="listUsers", summary="List users, oldest first")
    async def list_users(
        self, session: NamedDependency[AsyncSession], after: FromQuery[str | None] = None, limit: Limit = 50
    ) -> Page[UserView]:
        return await service.list_users(session, after=after, limit=limit)

    @post(operation_id="createUser", summary="Create a user")
    async def create_user(
        self, session: NamedDependency[AsyncSession], passwords: NamedDependency[Passwords], data: JSONBody[UserRequest]
    ) -> UserView:
        return await service.create_user(
            session, email=data.email, password=data.password, role=data.role, passwords=passwords
        )

    @patch("/{user_id:uuid}", operation_id="changeUser", summary="Change a user and end its sessions")
    async def change_user(
        self,
        session: NamedDependency[AsyncSession],
        passwords: NamedDependency[Passwords],
        user_id: FromPath[UUID],
        data: JSONBody[UserPatch],
    ) -> UserView:
        return await service.change_user(session, user_id, data, passwords)


class ApiTokenController(Controller):
    """Bearer tokens of the admin API."""

    path = "/api/v1/api-tokens"
    tags = ["accounts"]  # noqa: RUF012 - the framework's own attribute
    request_max_body_size = BODY_LIMIT

    @get(operation_id="listApiTokens", summary="List admin tokens, oldest first")
    async def list_tokens(
        self, session: NamedDependency[AsyncSession], after: FromQuery[str | None] = None, limit: Limit = 50
    ) -> Page[ApiTokenView]:
        return await service.list_api_tokens(session, after=after, limit=limit)

    @post(operation_id="createApiToken", summary="Create an admin token; its text is shown once")
    async def create_token(
        self, session: NamedDependency[AsyncSession], data: JSONBody[ApiTokenRequest]
    ) -> CreatedApiToken:
        token, view = await service.create_api_token(
            session, name=data.name, role=data.role, expires_at=data.expires_at
        )
        return CreatedApiToken(token=token.reveal(), view=view)

    @delete("/{token_id:uuid}", operation_id="revokeApiToken", summary="Revoke an admin token", status_code=200)
    async def revoke_token(self, session: NamedDependency[AsyncSession], token_id: FromPath[UUID]) -> ApiTokenView:
        return await service.revoke_api_token(session, token_id)


def provide_passwords(state: State) -> Passwords:
    """The process's password hasher."""
    passwords: Passwords = state.passwords
    return passwords


router = Router(
    "/",
    route_handlers=[whoami, UserController, ApiTokenController],
    dependencies={"passwords": Provide(provide_passwords, sync_to_thread=False)},
)
