"""Rows of tenants, their projects, principals and API keys, and the epoch every policy change bumps.

Layer: service. Only this domain imports these models; others ask `tenants.service`. Triggers on all but `policy_state`
bump that and notify (migrations 0001, 0003), so no code path can forget to.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    SmallInteger,
    String,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base


class Tenant(Base):
    """One tenant. `cache_salt` keeps its KV prefixes apart from other tenants' and never leaves the fleet."""

    __tablename__ = "tenants"
    __table_args__ = (
        CheckConstraint("slug ~ '^[a-z0-9-]{1,40}$'", name="slug_shape"),
        CheckConstraint("weight >= 0.001 AND weight <= 1000", name="weight"),
        CheckConstraint("floor_tokens_per_s >= 0 AND floor_tokens_per_s <= 1000000000", name="floor"),
        Index("ix_tenants_created_at_id", "created_at", "id"),
    )

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()"))
    slug: Mapped[str] = mapped_column(String(40), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    cache_salt: Mapped[str] = mapped_column(String(64))
    allowed_models: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    active: Mapped[bool] = mapped_column(Boolean, server_default=text("true"))
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    time_zone: Mapped[str] = mapped_column(String(64), server_default="UTC")
    weight: Mapped[float] = mapped_column(Double, server_default=text("1"))
    floor_tokens_per_s: Mapped[float] = mapped_column(Double, server_default=text("0"))
    notes: Mapped[dict[str, str]] = mapped_column("metadata", JSONB, server_default=text("'{}'::jsonb"))
    prompt_log: Mapped[dict[str, object] | None] = mapped_column(JSONB(none_as_null=True))
    """How prompts are kept (`PromptLogging`); null keeps none."""
    idempotency_key: Mapped[str | None] = mapped_column(String(128), unique=True)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class Project(Base):
    """What a tenant's keys are grouped by; every tenant has one named "default"."""

    __tablename__ = "projects"
    __table_args__ = (
        CheckConstraint("slug ~ '^[a-z0-9-]{1,40}$'", name="slug_shape"),
        UniqueConstraint("tenant_id", "slug"),
        UniqueConstraint("tenant_id", "idempotency_key"),
        Index("ix_projects_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
    )

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()"))
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    slug: Mapped[str] = mapped_column(String(40))
    name: Mapped[str] = mapped_column(String(200))
    allowed_models: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    active: Mapped[bool] = mapped_column(Boolean, server_default=text("true"))
    notes: Mapped[dict[str, str]] = mapped_column("metadata", JSONB, server_default=text("'{}'::jsonb"))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class Principal(Base):
    """Who owns keys: a person, who has an e-mail address, or a service account."""

    __tablename__ = "principals"
    __table_args__ = (
        CheckConstraint("kind IN ('service_account', 'person')", name="kind"),
        CheckConstraint("role IN ('admin', 'member', 'viewer')", name="role"),
        CheckConstraint("(kind = 'person') = (email IS NOT NULL)", name="email"),
        CheckConstraint("email = lower(email)", name="email_case"),
        UniqueConstraint("tenant_id", "name"),
        UniqueConstraint("tenant_id", "idempotency_key"),
        Index("ix_principals_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
    )

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()"))
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(200))
    email: Mapped[str | None] = mapped_column(String(254))
    role: Mapped[str] = mapped_column(String(16))
    active: Mapped[bool] = mapped_column(Boolean, server_default=text("true"))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class ApiKey(Base):
    """One key of one project: its public id, the hash of its secret, never the secret.

    `identity` is the id of the first key of a chain of rotations, and `rotated_to` the key that follows this one.
    """

    __tablename__ = "api_keys"
    __table_args__ = (
        UniqueConstraint("tenant_id", "idempotency_key"),
        Index("ix_api_keys_tenant_id_created_at_key_id", "tenant_id", "created_at", "key_id"),
    )

    key_id: Mapped[str] = mapped_column(String(11), primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id", ondelete="CASCADE"), index=True)
    principal_id: Mapped[UUID | None] = mapped_column(ForeignKey("principals.id", ondelete="SET NULL"), index=True)
    identity: Mapped[str] = mapped_column(String(11), index=True)
    rotated_to: Mapped[str | None] = mapped_column(String(11))
    scopes: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=text("'{inference,quota:read}'"))
    notes: Mapped[dict[str, str]] = mapped_column("metadata", JSONB, server_default=text("'{}'::jsonb"))
    name: Mapped[str] = mapped_column(String(200))
    secret_hash: Mapped[bytes] = mapped_column(LargeBinary)
    last4: Mapped[str] = mapped_column(String(4))
    allowed_models: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class PolicyState(Base):
    """The one row that counts policy changes; only the trigger function writes it."""

    __tablename__ = "policy_state"
    __table_args__ = (CheckConstraint("id = 1", name="single_row"),)

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    epoch: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    changed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
