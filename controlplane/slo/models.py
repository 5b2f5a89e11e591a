"""Rows of service level objectives. Layer: service. Only this domain imports them; others ask `slo.service`.

A trigger (migration 0004) announces every change to the gateways.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    SmallInteger,
    String,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base


class SloRow(Base):
    """The objectives of one tenant (or all) × pool (or any) × class (or any); a latency and its share go together."""

    __tablename__ = "slos"
    __table_args__ = (
        CheckConstraint("(ttft_ms IS NULL) = (ttft_share IS NULL)", name="ttft"),
        CheckConstraint("(tpot_ms IS NULL) = (tpot_share IS NULL)", name="tpot"),
        CheckConstraint("ttft_ms > 0 AND tpot_ms > 0", name="latencies"),
        CheckConstraint(
            "ttft_share > 0 AND ttft_share < 1 AND tpot_share > 0 AND tpot_share < 1 "
            "AND availability > 0 AND availability < 1",
            name="shares",
        ),
        CheckConstraint("coalesce(ttft_share, tpot_share, availability) IS NOT NULL", name="promises_something"),
        CheckConstraint("window_days BETWEEN 1 AND 90", name="window"),
        UniqueConstraint("tenant_id", "pool", "class", postgresql_nulls_not_distinct=True),
        UniqueConstraint("idempotency_key"),
        Index("ix_slos_created_at_id", "created_at", "id"),
    )

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()"))
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    tenant: Mapped[str | None] = mapped_column(String(40))
    pool: Mapped[str] = mapped_column(String(200), server_default=text("''"))
    service_class: Mapped[str] = mapped_column("class", String(40), server_default=text("''"))
    ttft_ms: Mapped[int | None] = mapped_column(Integer)
    ttft_share: Mapped[float | None] = mapped_column(Double)
    tpot_ms: Mapped[float | None] = mapped_column(Double)
    tpot_share: Mapped[float | None] = mapped_column(Double)
    availability: Mapped[float | None] = mapped_column(Double)
    window_days: Mapped[int] = mapped_column(SmallInteger, server_default=text("30"))
    enabled: Mapped[bool] = mapped_column(Boolean, server_default=text("true"))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
