"""The opt-in log of prompts and answers, and who read it.

Revision: 0010. `tenants.prompt_log` says how a tenant's prompts are kept; null, which every tenant has, keeps none. The
tenants' trigger announces its changes to the gateways. `logged_requests` goes with its tenant.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

NOW = sa.text("now()")
AT = sa.DateTime(timezone=True)
NAME = sa.String(200)


def upgrade() -> None:
    op.add_column("tenants", sa.Column("prompt_log", postgresql.JSONB(none_as_null=True), nullable=True))
    op.create_table(
        "logged_requests",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("at", AT, nullable=False),
        sa.Column("request_id", NAME, nullable=False),
        sa.Column("project", NAME, nullable=False),
        sa.Column("key_id", NAME, nullable=False),
        sa.Column("model", NAME, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("reason", NAME, nullable=False),
        sa.Column("status", sa.SmallInteger, nullable=False),
        sa.Column("prompt", sa.Text, nullable=False),
        sa.Column("answer", sa.Text, nullable=False),
        sa.Column("cut", sa.Boolean, nullable=False),
        sa.Column("redactions", sa.Integer, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_logged_requests_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_logged_requests")),
    )
    op.create_index("ix_logged_requests_tenant_id_at_id", "logged_requests", ["tenant_id", "at", "id"])
    op.create_index("ix_logged_requests_at", "logged_requests", ["at"])
    op.create_table(
        "logged_request_reads",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("at", AT, server_default=NOW, nullable=False),
        sa.Column("reader", sa.String(254), nullable=False),
        sa.Column("tenant", sa.String(40), nullable=False),
        sa.Column("entry_id", sa.BigInteger, nullable=False),
        sa.Column("request_id", NAME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_logged_request_reads")),
    )
    op.create_index("ix_logged_request_reads_tenant_at_id", "logged_request_reads", ["tenant", "at", "id"])


def downgrade() -> None:
    op.drop_table("logged_request_reads")
    op.drop_table("logged_requests")
    op.drop_column("tenants", "prompt_log")
