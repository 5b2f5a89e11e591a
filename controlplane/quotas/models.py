"""Rows of quotas, their temporary raises, prices, and what tenants asked for.

Layer: service. Only this domain imports these models; others ask `quotas.service`, `quotas.price_service` and
`quotas.request_service`. Triggers (migration 0004) announce every change of what a gateway enforces or charges, and
keep the history of prices: rows never overlap, and what has been in force is never changed. `tenant` and `project`
repeat slugs, which never change.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Index,
    String,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base
from controlplane.quotas.schemas import Away, QuotaKind

KINDS = "kind IN (" + ", ".join(f"'{kind}'" for kind in QuotaKind) + ")"
AWAYS = "away IN (" + ", ".join(f"'{away}'" for away in Away) + ")"
ONE_SCOPE = "project_id IS NULL OR key_identity IS NULL"


class Quota(Base):
    """One limit of a tenant, or of one of its projects, or of a key's identity; `model` is empty for any."""

    __tablename__ = "quotas"
    __table_args__ = (
        CheckConstraint(KINDS, name="kind"),
        CheckConstraint(AWAYS, name="away"),
        CheckConstraint(ONE_SCOPE, name="one_scope"),
        CheckConstraint("soft IS NOT NULL OR hard IS NOT NULL", name="limits_something"),
        CheckConstraint("soft >= 0 AND hard >= 0 AND soft <= hard", name="amounts"),
        CheckConstraint("CASE WHEN away = 'local' THEN local > 0 ELSE local = 0 END", name="local"),
        UniqueConstraint(
            "tenant_id", "project_id", "key_identity", "model", "kind", postgresql_nulls_not_distinct=True
        ),
        UniqueConstraint("tenant_id", "idempotency_key"),
        Index("ix_quotas_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
    )

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()"))
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    tenant: Mapped[str] = mapped_column(String(40))
    project_id: Mapped[UUID | None] = mapped_column(ForeignKey("projects.id", ondelete="CASCADE"), index=True)
    project: Mapped[str | None] = mapped_column(String(40))
    key_identity: Mapped[str | None] = mapped_column(String(11))
    model: Mapped[str] = mapped_column(String(200), server_default=text("''"))
    kind: Mapped[str] = mapped_column(String(40))
    soft: Mapped[int | None] = mapped_column(BigInteger)
    hard: Mapped[int | None] = mapped_column(BigInteger)
    away: Mapped[str] = mapped_column(String(8), server_default=text("'closed'"))
    local: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class Grant(Base):
    """A temporary raise of one quota: `amount` more in [starts_at, expires_at). One ended early keeps its row."""

    __tablename__ = "quota_grants"
    __table_args__ = (
        CheckConstraint("amount > 0", name="amount"),
        CheckConstraint("starts_at <= expires_at", name="span"),
        UniqueConstraint("quota_id", "idempotency_key"),
        Index("ix_quota_grants_quota_id_created_at_id", "quota_id", "created_at", "id"),
    )

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()"))
    quota_id: Mapped[UUID] = mapped_column(ForeignKey("quotas.id", ondelete="CASCADE"))
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    amount: Mapped[int] = mapped_column(BigInteger)
    starts_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    expires_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    reason: Mapped[str] = mapped_column(String(500))
    granted_by: Mapped[str] = mapped_column(String(254))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class PriceRow(Base):
    """What a pool's use costs in [valid_from, valid_until), in micro-units; `pool` is empty for any without its own."""

    __tablename__ = "prices"
    __table_args__ = (
        CheckConstraint(
            "uncached_input >= 0 AND cached_input >= 0 AND output >= 0 AND device_second >= 0", name="amounts"
        ),
        CheckConstraint("valid_from < valid_until", name="span"),
        UniqueConstraint("pool", "valid_from"),
        UniqueConstraint("idempotency_key"),
        Index("ix_prices_valid_from_id", "valid_from", "id"),
    )

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()"))
    pool: Mapped[str] = mapped_column(String(200), server_default=text("''"))
    uncached_input: Mapped[int] = mapped_column(BigInteger)
    cached_input: Mapped[int] = mapped_column(BigInteger)
    output: Mapped[int] = mapped_column(BigInteger)
    device_second: Mapped[int] = mapped_column(BigInteger)
    valid_from: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    valid_until: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    set_by: Mapped[str] = mapped_column(String(254))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class QuotaRequest(Base):
    """A tenant asks for `amount` more of one quota, until an instant or for good; it outlives the quota it names.
    `wanted` is the hard limit it wished for, if it said so.

    Approved, it was given `given` until `given_until`, or for good when that is null.
    """

    __tablename__ = "quota_requests"
    __table_args__ = (
        CheckConstraint(KINDS, name="kind"),
        CheckConstraint("amount > 0", name="amount"),
        CheckConstraint("state IN ('open', 'approved', 'declined')", name="state"),
        CheckConstraint("(state = 'open') = (decided_at IS NULL)", name="decided"),
        CheckConstraint("(state = 'approved') = (given IS NOT NULL)", name="given"),
        UniqueConstraint("tenant_id", "idempotency_key"),
        Index("ix_quota_requests_created_at_id", "created_at", "id"),
        Index("ix_quota_requests_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
        Index("ix_quota_requests_open", "created_at", "id", postgresql_where=text("state = 'open'")),
    )

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()"))
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    tenant: Mapped[str] = mapped_column(String(40))
    quota_id: Mapped[UUID | None] = mapped_column(ForeignKey("quotas.id", ondelete="SET NULL"), index=True)
    project: Mapped[str | None] = mapped_column(String(40))
    key_identity: Mapped[str | None] = mapped_column(String(11))
    model: Mapped[str] = mapped_column(String(200), server_default=text("''"))
    kind: Mapped[str] = mapped_column(String(40))
    amount: Mapped[int] = mapped_column(BigInteger)
    wanted: Mapped[int | None] = mapped_column(BigInteger)
    until: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    reason: Mapped[str] = mapped_column(String(500))
    asked_by: Mapped[str] = mapped_column(String(254))
    state: Mapped[str] = mapped_column(String(8), server_default=text("'open'"))
    decided_by: Mapped[str | None] = mapped_column(String(254))
    decided_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    note: Mapped[str] = mapped_column(String(500), server_default=text("''"))
    given: Mapped[int | None] = mapped_column(BigInteger)
    given_until: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
