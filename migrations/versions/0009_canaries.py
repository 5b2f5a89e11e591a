"""Canaries: when each limit was last proven, and the runs that prove them.

Revision: 0009. No gateway reads either table, so no change of them is announced.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

AT = sa.DateTime(timezone=True)
KINDS = (
    "kind IN ('requests_per_minute', 'tokens_per_minute', 'input_tokens_per_minute', "
    "'uncached_input_tokens_per_minute', 'output_tokens_per_minute', 'concurrent_requests', 'tokens_per_day', "
    "'tokens_per_month', 'money_per_day', 'money_per_month', 'max_prompt_tokens', 'max_output_tokens')"
)


def upgrade() -> None:
    op.create_table(
        "canaries",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("gateway", sa.String(500), nullable=False),
        sa.Column("endpoint", sa.String(100), nullable=False),
        sa.Column("level", sa.String(16), nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("window_start", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("proven_at", AT, nullable=True),
        sa.Column("failed_at", AT, nullable=True),
        sa.Column("not_run_at", AT, nullable=True),
        sa.Column("why", sa.String(500), server_default=sa.text("''"), nullable=False),
        sa.Column("seconds", sa.Double, nullable=True),
        sa.CheckConstraint(KINDS, name=op.f("ck_canaries_kind")),
        sa.CheckConstraint("level IN ('tenant', 'project', 'key')", name=op.f("ck_canaries_level")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_canaries")),
        sa.UniqueConstraint(
            "gateway", "endpoint", "level", "kind", name=op.f("uq_canaries_gateway_endpoint_level_kind")
        ),
    )
    op.create_table(
        "canary_runs",
        sa.Column("window_start", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("fence", sa.Integer, server_default=sa.text("0"), nullable=False),
        sa.Column("holder", sa.String(200), nullable=True),
        sa.Column("expires_at", AT, nullable=True),
        sa.Column("done_at", AT, nullable=True),
        sa.PrimaryKeyConstraint("window_start", name=op.f("pk_canary_runs")),
    )


def downgrade() -> None:
    op.drop_table("canary_runs")
    op.drop_table("canaries")
