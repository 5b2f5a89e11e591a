"""Rows of operators, their console sessions and the admin API's bearer tokens.

Layer: service. Only this domain imports these models. Session ids and tokens are stored as SHA-256 of 256
random bits, passwords as argon2id; nothing here can be turned back into a credential.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import Boolean, CheckConstraint, DateTime, ForeignKey, LargeBinary, String, Text, Uuid, func, text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base

ROLES = "role IN ('operator', 'viewer')"


class User(Base):
    """Somebody who logs in to the console. `email` is kept in lower case."""

    __tablename__ = "users"
    __table_args__ = (CheckConstraint(ROLES, name="role"), CheckConstraint("email = lower(email)", name="email_case"))

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()"))
    email: Mapped[str] = mapped_column(String(254), unique=True)
    password_hash: Mapped[str] = mapped_column(Text)
    role: Mapped[str] = mapped_column(String(16))
    active: Mapped[bool] = mapped_column(Boolean, server_default=text("true"))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    last_login_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class UserSession(Base):
    """One login. It ends at `expires_at`, after a time without use, or when its row goes."""

    __tablename__ = "user_sessions"

    token_hash: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    user_id: Mapped[UUID] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    last_seen_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    expires_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), index=True)


class ApiToken(Base):
    """A bearer token of the admin API."""

    __tablename__ = "api_tokens"
    __table_args__ = (CheckConstraint(ROLES, name="role"),)

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()"))
    name: Mapped[str] = mapped_column(String(200), unique=True)
    token_hash: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    role: Mapped[str] = mapped_column(String(16))
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
