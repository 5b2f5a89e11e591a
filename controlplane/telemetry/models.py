"""Rows of telemetry windows, the gateways that report, and the roll-ups still to be done.

Layer: service. Only this domain imports these models.

A window's `data` is msgpack of the very wire struct (`Window` from engines, `GatewayCounters` from gateways),
not jsonb: nothing queries inside it, it is always merged whole in Python, it keeps integer bucket keys, it takes
about a third of jsonb's room, and an unknown field of a newer reporter is skipped when read. What is queried
(time, who, where) are columns, and together they are the primary key, so that replacing a window is one upsert.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    String,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base


class TelemetryWindow(Base):
    """What one source saw within [start, start + resolution).

    10 s rows are per reporter (`instance`, `boot_epoch`), pool, replica and tenant; a gateway row whose pool,
    replica and tenant are all empty says only that the gateway was reporting. 60 s and 3600 s rows are per
    pool and tenant: `instance` and `replica` are empty and `boot_epoch` is 0. `sequence` fences: the report's
    number at 10 s, the claim's fence above.
    """

    __tablename__ = "telemetry_windows"
    __table_args__ = (
        CheckConstraint("resolution IN (10, 60, 3600)", name="resolution"),
        CheckConstraint("source IN ('engine', 'gateway')", name="source"),
        CheckConstraint("start % resolution = 0", name="aligned"),
    )

    resolution: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    source: Mapped[str] = mapped_column(String(8), primary_key=True)
    instance: Mapped[str] = mapped_column(String(200), primary_key=True)
    boot_epoch: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    pool: Mapped[str] = mapped_column(String(200), primary_key=True)
    replica: Mapped[str] = mapped_column(String(200), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(200), primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger)
    recorded_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    data: Mapped[bytes] = mapped_column(LargeBinary)


class RefusalWindow(Base):
    """Requests of one tenant that one gateway refused for one reason within [start, start + 10 s).

    `quota_id` and `kind` name the limit in the way and are empty for other reasons; `sequence` fences; `latest` is
    msgpack of the window's last `RefusedRequest`s.
    """

    __tablename__ = "refusal_windows"
    __table_args__ = (Index("ix_refusal_windows_start", "start"),)

    tenant: Mapped[str] = mapped_column(String(200), primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    code: Mapped[str] = mapped_column(String(200), primary_key=True)
    quota_id: Mapped[str] = mapped_column(String(200), primary_key=True)
    instance: Mapped[str] = mapped_column(String(200), primary_key=True)
    boot_epoch: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(200))
    sequence: Mapped[int] = mapped_column(BigInteger)
    count: Mapped[int] = mapped_column(BigInteger)
    latest: Mapped[bytes] = mapped_column(LargeBinary)


class Gateway(Base):
    """A gateway as of its newest report; `(boot_epoch, sequence)` fences."""

    __tablename__ = "gateways"

    id: Mapped[str] = mapped_column(String(200), primary_key=True)
    boot_epoch: Mapped[int] = mapped_column(BigInteger)
    sequence: Mapped[int] = mapped_column(BigInteger)
    policy_epoch: Mapped[int] = mapped_column(BigInteger)
    in_flight: Mapped[int] = mapped_column(Integer)
    started_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    last_report_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    spool_bytes: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    spool_full: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    spool_oldest_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class RollupClaim(Base):
    """One window of one roll-up job, from "has new data" to "done", claimed by one worker at a time.

    `touched` grows when source rows change after a run read them, `done` is the value the last finished run
    saw: the window is due while they differ. `fence` grows with each claim; a worker whose claim has expired
    and was taken over holds an older fence and can finish nothing.
    """

    __tablename__ = "rollup_claims"
    __table_args__ = (Index("ix_rollup_claims_due", "job", "window_start", postgresql_where=text("touched > done")),)

    job: Mapped[str] = mapped_column(String(20), primary_key=True)
    window_start: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    touched: Mapped[int] = mapped_column(BigInteger, server_default=text("1"))
    done: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    fence: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    holder: Mapped[str | None] = mapped_column(String(200))
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    finished_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
