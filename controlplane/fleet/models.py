"""Rows of pools, replicas and what happened to replicas.

Layer: service. Only this domain imports these models; others ask `fleet.service`. Triggers (migration 0002)
notify gateways of any change to a pool and of a replica's state, address, pool, model or boot, not of each report.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    String,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base
from dataplane.protocol import ReplicaState

STATES = "state IN (" + ", ".join(f"'{state}'" for state in ReplicaState) + ")"


class Pool(Base):
    """Replicas that serve one model name to tenants through one kind of backend."""

    __tablename__ = "pools"
    __table_args__ = (CheckConstraint("replica_slots >= 0 AND replica_tokens >= 0", name="size"),)

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    model: Mapped[str] = mapped_column(String(200))
    backend: Mapped[str] = mapped_column(String(40), server_default=text("'native'"))
    replica_slots: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    replica_tokens: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class Replica(Base):
    """A replica as of its newest report, and what the control plane concluded or wants of it.

    `state` is the effective one: what the replica said, overruled by silence (STALE, LOST) or by
    `drain_wanted`. `(boot_epoch, sequence)` fences: an older report changes nothing. `ready` is msgpack
    `CoreReady`. The row is rewritten once a second, so pages keep free space for in-page updates and no
    index covers what changes.
    """

    __tablename__ = "replicas"
    __table_args__ = (CheckConstraint(STATES, name="state"), {"postgresql_with": {"fillfactor": 50}})

    id: Mapped[str] = mapped_column(String(200), primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name"), index=True)
    model: Mapped[str] = mapped_column(String(200))
    url: Mapped[str] = mapped_column(String(500))
    state: Mapped[str] = mapped_column(String(16))
    state_reason: Mapped[str] = mapped_column(String(500), server_default=text("''"))
    state_since: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    drain_wanted: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    boot_epoch: Mapped[int] = mapped_column(BigInteger)
    core_epoch: Mapped[int] = mapped_column(BigInteger)
    sequence: Mapped[int] = mapped_column(BigInteger)
    core_restarts: Mapped[int] = mapped_column(Integer)
    policy_epoch: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    last_report_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    usage_told_until: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """Usage of attempts that ended before then has all come, by the replica's clock and never ahead of ours."""
    ready: Mapped[bytes | None] = mapped_column(LargeBinary)
    registered_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class ReplicaEvent(Base):
    """One thing that happened to a replica: `registered`, `state`, `boot`, `core_restart` or `drain`.

    Written in the transaction of the change itself, so there is exactly one whoever saw it first. Retention
    removes old events.
    """

    __tablename__ = "replica_events"
    __table_args__ = (
        Index("ix_replica_events_replica_at", "replica", "at"),
        Index("ix_replica_events_at", "at"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    replica: Mapped[str] = mapped_column(ForeignKey("replicas.id", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    kind: Mapped[str] = mapped_column(String(16))
    before: Mapped[str] = mapped_column(String(16), server_default=text("''"))
    after: Mapped[str] = mapped_column(String(16), server_default=text("''"))
    reason: Mapped[str] = mapped_column(String(500), server_default=text("''"))
    boot_epoch: Mapped[int] = mapped_column(BigInteger)
    core_epoch: Mapped[int] = mapped_column(BigInteger)
