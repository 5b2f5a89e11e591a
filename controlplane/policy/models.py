"""Rows of the policy's history. Layer: service. Only this domain imports them; triggers (migration 0007) write them.

They are written in the transaction of the change they tell of, whoever makes it, so there is no change without its row.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, DateTime, Identity, Index, String, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base


class PolicyEpoch(Base):
    """When an epoch began, so that being behind has an age."""

    __tablename__ = "policy_epochs"

    epoch: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.clock_timestamp())


class PolicyChange(Base):
    """One row of a policy table changed: `before` is null for a new one, `after` for one that is gone.

    `object` is the table's name. `restores` names the change that this one took back.
    """

    __tablename__ = "policy_changes"
    __table_args__ = (
        CheckConstraint("before IS NOT NULL OR after IS NOT NULL", name="something"),
        Index("ix_policy_changes_object_row_id_id", "object", "row_id", "id"),
        Index("ix_policy_changes_tenant_id", "tenant", "id"),
        Index("ix_policy_changes_at", "at"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    epoch: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.clock_timestamp())
    who: Mapped[str] = mapped_column(String(254))
    object: Mapped[str] = mapped_column(String(40))
    row_id: Mapped[str] = mapped_column(String(64))
    tenant: Mapped[str | None] = mapped_column(String(40))
    before: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    after: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    restores: Mapped[int | None] = mapped_column(BigInteger)
