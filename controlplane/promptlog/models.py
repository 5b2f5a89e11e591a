"""Rows of logged requests, and of who read them.

Layer: service. Only this domain imports these models. A logged request goes with its tenant; a reading stays, without
any text, because it is about the reader.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger, Boolean, DateTime, ForeignKey, Identity, Index, Integer, SmallInteger, String, Text
from sqlalchemy import func as sql
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base


class LoggedRequest(Base):
    """One request of a tenant that has asked for it, redacted before it left the gateway."""

    __tablename__ = "logged_requests"
    __table_args__ = (
        Index("ix_logged_requests_tenant_id_at_id", "tenant_id", "at", "id"),
        Index("ix_logged_requests_at", "at"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    request_id: Mapped[str] = mapped_column(String(200))
    project: Mapped[str] = mapped_column(String(200))
    key_id: Mapped[str] = mapped_column(String(200))
    model: Mapped[str] = mapped_column(String(200))
    outcome: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(String(200))
    status: Mapped[int] = mapped_column(SmallInteger)
    prompt: Mapped[str] = mapped_column(Text)
    answer: Mapped[str] = mapped_column(Text)
    cut: Mapped[bool] = mapped_column(Boolean)
    redactions: Mapped[int] = mapped_column(Integer)


class LoggedRequestRead(Base):
    """Somebody read one logged request."""

    __tablename__ = "logged_request_reads"
    __table_args__ = (Index("ix_logged_request_reads_tenant_at_id", "tenant", "at", "id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=sql.now())
    reader: Mapped[str] = mapped_column(String(254))
    tenant: Mapped[str] = mapped_column(String(40))
    entry_id: Mapped[int] = mapped_column(BigInteger)
    request_id: Mapped[str] = mapped_column(String(200))
