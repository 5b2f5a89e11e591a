"""Rows of share plans. Layer: service. Only this domain imports them; others ask `admission.service`."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, DateTime, ForeignKey, LargeBinary, Text, func, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base


class SharePlanRow(Base):
    """The plan in force for one pool. `plan` is msgpack `shares.SharePlan`; `window_start` is the window it was made
    in (Unix seconds), and claims it.
    """

    __tablename__ = "share_plans"
    __table_args__ = (CheckConstraint("epoch > 0", name="epoch"),)

    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[int] = mapped_column(BigInteger)
    window_start: Mapped[int] = mapped_column(BigInteger)
    plan: Mapped[bytes] = mapped_column(LargeBinary)
    reasons: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=text("'{}'"))
    planned_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
