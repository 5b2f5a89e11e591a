"""Rows of canaries and of their runs. Layer: service. Only this domain imports them; others ask `canaries.service`."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, DateTime, Double, Identity, Integer, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base
from controlplane.quotas.schemas import QuotaKind, QuotaLevel

KINDS = "kind IN (" + ", ".join(f"'{kind}'" for kind in QuotaKind) + ")"
LEVELS = "level IN (" + ", ".join(f"'{level}'" for level in QuotaLevel) + ")"


class Canary(Base):
    """One limit kind × level × endpoint × gateway, and how its probes ended. `window_start` is of the last run."""

    __tablename__ = "canaries"
    __table_args__ = (
        CheckConstraint(KINDS, name="kind"),
        CheckConstraint(LEVELS, name="level"),
        UniqueConstraint("gateway", "endpoint", "level", "kind"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    gateway: Mapped[str] = mapped_column(String(500))
    endpoint: Mapped[str] = mapped_column(String(100))
    level: Mapped[str] = mapped_column(String(16))
    kind: Mapped[str] = mapped_column(String(40))
    window_start: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    proven_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    failed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    not_run_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    why: Mapped[str] = mapped_column(String(500), server_default=text("''"))
    seconds: Mapped[float | None] = mapped_column(Double)


class CanaryRunRow(Base):
    """One run over all canaries, claimed by whoever raised its `fence` last; one at a time is under way."""

    __tablename__ = "canary_runs"

    window_start: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    fence: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    holder: Mapped[str | None] = mapped_column(String(200))
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    done_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
