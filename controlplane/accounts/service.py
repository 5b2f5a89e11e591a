"""Who may enter: passwords, console sessions and admin API tokens.

Layer: service. For the console's pages:

    cookie = await service.login(request, email, password)   # AuthenticationError 401, RateLimitedError 429
    return Redirect(browser.safe_next(next), cookies=[cookie])
    cookie = await service.logout(request)                    # a cookie that ends the old one; always succeeds
    alive = await service.still_logged_in(request)            # for long streams: ask again from time to time

`login` and `logout` open their own transactions, because hashing a password must not hold a connection. A login
makes a new session id and ends the one the browser came with. The error never tells whether the account exists,
and an unknown one costs the same work.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie
from msgspec import UNSET
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts import browser, repository, tokens
from controlplane.accounts.models import ApiToken, User
from controlplane.accounts.passwords import LONGEST, Passwords
from controlplane.accounts.schemas import ApiTokenView, Principal, PrincipalKind, Role, UserPatch, UserView
from controlplane.accounts.throttle import LoginThrottle
from controlplane.component import Resources
from controlplane.db import transaction
from controlplane.errors import AuthenticationError, ConflictError, InvalidRequestError, NotFoundError
from controlplane.paging import Cursor, Page, checked, decode_uuid, page
from controlplane.settings import Secret

log = logging.getLogger("tidegate.accounts")

SESSION_LIFETIME = timedelta(hours=12)
SESSION_IDLE = timedelta(hours=1)
_TOUCH_AFTER = timedelta(minutes=1)
_SHORTEST_PASSWORD = 12

Connection = ASGIConnection[Any, Any, Any, Any]


async def authenticate(
    resources: Resources,
    throttle: LoginThrottle,
    passwords: Passwords,
    *,
    email: str,
    password: str,
    address: str,
) -> Principal:
    """The user of that email and password. Raises AuthenticationError or RateLimitedError."""
    email = email.strip().lower()
    wrong = AuthenticationError("the email or the password is wrong", code="wrong_credentials")
    await throttle.attempt(email[:254], address)
    if len(email) > 254 or len(password) > LONGEST or not email.isprintable():
        raise wrong
    async with transaction(resources.engine) as session:
        user = await repository.user_by_email(session, email)
    right = await passwords.verify(user.password_hash if user else None, password)
    if user is None or not right or not user.active:
        log.info("refused a login from %s", address)
        raise wrong
    await throttle.succeeded(email, address)
    if passwords.outdated(user.password_hash):
        stronger = await passwords.hash(password)
        async with transaction(resources.engine) as session:
            await repository.set_password(session, user.id, stronger)
    return _user_principal(user)


async def login(request: Connection, email: str, password: str) -> Cookie:
    """Check the credentials, start a session, and answer the cookie that carries it."""
    state = request.app.state
    resources: Resources = state.resources
    address = request.client.host if request.client else ""
    user = await authenticate(
        resources, state.login_throttle, state.passwords, email=email, password=password, address=address
    )
    token = tokens.mint_session_token()
    fresh, old = tokens.digest(token.reveal()), _session_digest(request)
    assert fresh is not None
    async with transaction(resources.engine) as session:
        if old is not None:
            await repository.delete_session(session, old)
        await repository.delete_ended_sessions(session, SESSION_IDLE)
        await repository.add_session(session, user.id, fresh, SESSION_LIFETIME)
    return browser.session_cookie(resources.settings, token, SESSION_LIFETIME)


async def logout(request: Connection) -> Cookie:
    """End the session on the server, and answer the cookie that removes it from the browser."""
    resources: Resources = request.app.state.resources
    old = _session_digest(request)
    if old is not None:
        async with transaction(resources.engine) as session:
            await repository.delete_session(session, old)
    return browser.ended_cookie(resources.settings)


async def principal_of_session(request: Connection) -> Principal | None:
    """The user behind the request's session cookie; keeps the session from idling out."""
    resources: Resources = request.app.state.resources
    token_hash = _session_digest(request)
    if token_hash is None:
        return None
    async with transaction(resources.engine) as session:
        found = await repository.user_of_session(session, token_hash, SESSION_IDLE)
        if found is None:
            return None
        user, last_seen, now = found
        if now - last_seen > _TOUCH_AFTER:
            await repository.touch_session(session, token_hash)
    return _user_principal(user)


async def still_logged_in(request: Connection) -> bool:
    """Whether the request's session lives on: a logout elsewhere ends a stream that asks."""
    return await principal_of_session(request) is not None


async def principal_of_token(resources: Resources, token: str) -> Principal | None:
    """Whom an admin API bearer token stands for."""
    token_hash = tokens.digest(token)
    if token_hash is None:
        return None
    async with transaction(resources.engine) as session:
        found = await repository.live_api_token(session, token_hash)
    if found is None:
        return None
    return Principal(kind=PrincipalKind.TOKEN, id=found.id, name=found.name, role=Role(found.role))


async def create_user(
    session: AsyncSession, *, email: str, password: str, role: Role, passwords: Passwords | None = None
) -> UserView:
    """A new user. Raises InvalidRequestError or ConflictError."""
    email = email.strip().lower()
    _check_email(email)
    _check_password(password)
    hashed = await _hash(password, passwords)
    added = await repository.add_user(session, email=email, password_hash=hashed, role=role.value)
    if added is None:
        raise ConflictError(f"a user with the email {email} exists already", code="email_taken", param="email")
    return _user_view(added)


async def list_users(session: AsyncSession, *, after: str | None = None, limit: int = 50) -> Page[UserView]:
    """Users, oldest first. One query."""
    limit = checked(limit)
    rows = await repository.users(session, after=decode_uuid(after), limit=limit)
    return page(rows, limit, _user_view, lambda row: Cursor(row.created_at, str(row.id)))


async def change_user(
    session: AsyncSession, user_id: UUID, patch: UserPatch, passwords: Passwords | None = None
) -> UserView:
    """Change role, state or password, and end the user's sessions. Somebody must stay who may change things.

    Raises InvalidRequestError, NotFoundError, or ConflictError for the last active operator.
    """
    hashed: str | None = None
    if patch.password is not UNSET:
        _check_password(patch.password)
        hashed = await _hash(patch.password, passwords)
    locked = await repository.lock_user_and_operators(session, user_id)
    user = next((user for user in locked if user.id == user_id), None)
    if user is None:
        raise NotFoundError(f"there is no user {user_id}", param="user_id")
    if patch.role is not UNSET:
        user.role = patch.role.value
    if patch.active is not UNSET:
        user.active = patch.active
    if hashed is not None:
        user.password_hash = hashed
    if not any(other.active and other.role == Role.OPERATOR.value for other in locked):
        raise ConflictError("this is the last active operator; make another one first", code="last_operator")
    await session.flush()
    await repository.delete_sessions_of(session, user_id)
    return _user_view(user)


async def ensure_admin(session: AsyncSession, email: str, password: str) -> None:
    """The bootstrap's operator: exists, is active, and has exactly this password."""
    email = email.strip().lower()
    _check_email(email)
    _check_password(password)
    hasher = Passwords()
    try:
        user = await repository.user_by_email(session, email)
        if user is None:
            await create_user(session, email=email, password=password, role=Role.OPERATOR, passwords=hasher)
            return
        user.active = True
        user.role = Role.OPERATOR.value
        if not await hasher.verify(user.password_hash, password):
            user.password_hash = await hasher.hash(password)
            await repository.delete_sessions_of(session, user.id)
        await session.flush()
    finally:
        hasher.close()


async def ensure_api_token(session: AsyncSession, name: str, token: str, role: Role = Role.OPERATOR) -> None:
    """The bootstrap's admin token of that name: exists, lives, and has exactly this secret."""
    token_hash = tokens.digest(token)
    if token_hash is None:
        raise InvalidRequestError("an admin token has 16 to 256 characters", param="token")
    await repository.put_api_token(session, name=name, token_hash=token_hash, role=role.value)


async def create_api_token(
    session: AsyncSession, *, name: str, role: Role, expires_at: datetime | None = None
) -> tuple[Secret, ApiTokenView]:
    """A new admin token, shown once. Raises InvalidRequestError, or ConflictError when the name is taken."""
    _check_token(name, expires_at)
    token = tokens.mint_api_token()
    token_hash = tokens.digest(token.reveal())
    assert token_hash is not None
    added = await repository.add_api_token(
        session, name=name, token_hash=token_hash, role=role.value, expires_at=expires_at
    )
    if added is None:
        raise ConflictError(f"an admin token named {name} exists already", code="name_taken", param="name")
    return token, _token_view(added)


async def list_api_tokens(session: AsyncSession, *, after: str | None = None, limit: int = 50) -> Page[ApiTokenView]:
    """Admin tokens, oldest first, revoked ones too. One query."""
    limit = checked(limit)
    rows = await repository.api_tokens(session, after=decode_uuid(after), limit=limit)
    return page(rows, limit, _token_view, lambda row: Cursor(row.created_at, str(row.id)))


async def revoke_api_token(session: AsyncSession, token_id: UUID) -> ApiTokenView:
    """Revoke at once; revoking again changes nothing. Raises NotFoundError."""
    revoked = await repository.revoke_api_token(session, token_id)
    if revoked is None:
        raise NotFoundError(f"there is no admin token {token_id}", param="token_id")
    return _token_view(revoked)


def _check_email(email: str) -> None:
    if not 3 <= len(email) <= 254 or "@" not in email.strip("@") or not email.isprintable():
        raise InvalidRequestError("the email must look like name@host", param="email")


def _check_token(name: str, expires_at: datetime | None) -> None:
    if not name.strip() or not name.isprintable():
        raise InvalidRequestError("name must have printable characters alone, not only spaces", param="name")
    if expires_at is not None and expires_at <= datetime.now(UTC):
        raise InvalidRequestError("expires_at lies in the past", param="expires_at")


def _check_password(password: str) -> None:
    if not _SHORTEST_PASSWORD <= len(password) <= LONGEST:
        raise InvalidRequestError(
            f"the password must have {_SHORTEST_PASSWORD} to {LONGEST} characters", param="password"
        )


async def _hash(password: str, passwords: Passwords | None) -> str:
    if passwords is not None:
        return await passwords.hash(password)
    own = Passwords()
    try:
        return await own.hash(password)
    finally:
        own.close()


def _session_digest(request: Connection) -> bytes | None:
    token = request.cookies.get(browser.session_cookie_name(request.app.state.resources.settings))
    return tokens.digest(token) if token else None


def _user_principal(user: User) -> Principal:
    return Principal(kind=PrincipalKind.USER, id=user.id, name=user.email, role=Role(user.role))


def _user_view(user: User) -> UserView:
    return UserView(
        id=user.id,
        email=user.email,
        role=Role(user.role),
        active=user.active,
        created_at=user.created_at,
        last_login_at=user.last_login_at,
    )


def _token_view(token: ApiToken) -> ApiTokenView:
    return ApiTokenView(
        id=token.id,
        name=token.name,
        role=Role(token.role),
        created_at=token.created_at,
        expires_at=token.expires_at,
        revoked_at=token.revoked_at,
    )
