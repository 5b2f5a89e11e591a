"""Queries over users, sessions and admin tokens.

Layer: service. Only queries: no rules, no commit. Time is the database's, so that all processes agree on expiry.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.models import ApiToken, User, UserSession


async def user_by_email(session: AsyncSession, email: str) -> User | None:
    return (await session.scalars(select(User).where(User.email == email))).one_or_none()


async def add_user(session: AsyncSession, *, email: str, password_hash: str, role: str) -> User | None:
    """None when the email is taken."""
    statement = insert(User).values(email=email, password_hash=password_hash, role=role)
    added = await session.scalars(statement.on_conflict_do_nothing(index_elements=["email"]).returning(User))
    return added.one_or_none()


async def users(session: AsyncSession, *, after: tuple[datetime, UUID] | None, limit: int) -> list[User]:
    """Oldest first, one more than `limit` where there are more."""
    query = select(User).order_by(User.created_at, User.id).limit(limit + 1)
    if after is not None:
        query = query.where(tuple_(User.created_at, User.id) > tuple_(*after))
    return list(await session.scalars(query))


async def lock_user_and_operators(session: AsyncSession, user_id: UUID) -> list[User]:
    """The user and every active operator, locked in id order until the transaction ends."""
    found = await session.scalars(
        select(User)
        .where((User.id == user_id) | ((User.role == "operator") & User.active))
        .order_by(User.id)
        .with_for_update()
    )
    return list(found)


async def set_password(session: AsyncSession, user_id: UUID, password_hash: str) -> None:
    await session.execute(update(User).where(User.id == user_id).values(password_hash=password_hash))


async def add_session(session: AsyncSession, user_id: UUID, token_hash: bytes, lifetime: timedelta) -> None:
    await session.execute(
        insert(UserSession).values(token_hash=token_hash, user_id=user_id, expires_at=func.now() + lifetime)
    )
    await session.execute(update(User).where(User.id == user_id).values(last_login_at=func.now()))


async def user_of_session(
    session: AsyncSession, token_hash: bytes, idle: timedelta
) -> tuple[User, datetime, datetime] | None:
    """The active user of a live session, when it was last seen, and the database's now."""
    found = await session.execute(
        select(User, UserSession.last_seen_at, func.now())
        .join(UserSession, UserSession.user_id == User.id)
        .where(
            UserSession.token_hash == token_hash,
            UserSession.expires_at > func.now(),
            UserSession.last_seen_at > func.now() - idle,
            User.active,
        )
    )
    row = found.one_or_none()
    return None if row is None else (row[0], row[1], row[2])


async def touch_session(session: AsyncSession, token_hash: bytes) -> None:
    await session.execute(
        update(UserSession).where(UserSession.token_hash == token_hash).values(last_seen_at=func.now())
    )


async def delete_session(session: AsyncSession, token_hash: bytes) -> None:
    await session.execute(delete(UserSession).where(UserSession.token_hash == token_hash))


async def delete_sessions_of(session: AsyncSession, user_id: UUID) -> None:
    await session.execute(delete(UserSession).where(UserSession.user_id == user_id))


async def delete_ended_sessions(session: AsyncSession, idle: timedelta) -> None:
    await session.execute(
        delete(UserSession).where(
            (UserSession.expires_at <= func.now()) | (UserSession.last_seen_at <= func.now() - idle)
        )
    )


async def live_api_token(session: AsyncSession, token_hash: bytes) -> ApiToken | None:
    found = await session.scalars(
        select(ApiToken).where(
            ApiToken.token_hash == token_hash,
            ApiToken.revoked_at.is_(None),
            ApiToken.expires_at.is_(None) | (ApiToken.expires_at > func.now()),
        )
    )
    return found.one_or_none()


async def put_api_token(session: AsyncSession, *, name: str, token_hash: bytes, role: str) -> None:
    """Create the token of that name, or give it this secret and role again."""
    fresh = {"token_hash": token_hash, "role": role}
    statement = insert(ApiToken).values(name=name, **fresh)
    await session.execute(
        statement.on_conflict_do_update(index_elements=["name"], set_={**fresh, "revoked_at": None, "expires_at": None})
    )


async def add_api_token(
    session: AsyncSession, *, name: str, token_hash: bytes, role: str, expires_at: datetime | None
) -> ApiToken | None:
    """None when the name is taken."""
    statement = insert(ApiToken).values(name=name, token_hash=token_hash, role=role, expires_at=expires_at)
    added = await session.scalars(statement.on_conflict_do_nothing(index_elements=["name"]).returning(ApiToken))
    return added.one_or_none()


async def api_tokens(session: AsyncSession, *, after: tuple[datetime, UUID] | None, limit: int) -> list[ApiToken]:
    """Oldest first, one more than `limit` where there are more."""
    query = select(ApiToken).order_by(ApiToken.created_at, ApiToken.id).limit(limit + 1)
    if after is not None:
        query = query.where(tuple_(ApiToken.created_at, ApiToken.id) > tuple_(*after))
    return list(await session.scalars(query))


async def revoke_api_token(session: AsyncSession, token_id: UUID) -> ApiToken | None:
    """The token, revoked now or before; None when there is none."""
    changed = await session.scalars(
        update(ApiToken)
        .where(ApiToken.id == token_id)
        .values(revoked_at=func.coalesce(ApiToken.revoked_at, func.now()))
        .returning(ApiToken)
    )
    return changed.one_or_none()
