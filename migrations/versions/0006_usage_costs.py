"""What usage cost, in the ledger's rows and sums; what gateways counted, held until the replica has spoken.

Revision: 0006. A row's cost is that of its attempt at the price then in force and never changes; null says that none
was. Rows from before have none: they are unpriced. `usage_held` keeps what gateways counted until the replica that did
the work has told its own count, or can tell none: `replicas.usage_told_until` says up to when it has told all.
`usage_attempts.by_gateway` marks the attempts whose row a gateway's count became. `gateways` learn how full their
spool is.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

AT = sa.DateTime(timezone=True)
NAME = sa.String(200)
ZERO = sa.text("0")
FALSE = sa.text("false")


def upgrade() -> None:
    op.add_column("usage_ledger", sa.Column("cost", sa.BigInteger))
    for name in ("cost", "unpriced_attempts"):
        op.add_column("usage_daily", sa.Column(name, sa.BigInteger, server_default=ZERO, nullable=False))
    op.execute("UPDATE usage_daily SET unpriced_attempts = attempts")
    op.add_column("usage_attempts", sa.Column("by_gateway", sa.Boolean, server_default=FALSE, nullable=False))
    op.create_table(
        "usage_held",
        sa.Column("attempt_id", NAME, nullable=False),
        sa.Column("request_id", NAME, nullable=False),
        sa.Column("tenant", NAME, nullable=False),
        sa.Column("project", NAME, nullable=False),
        sa.Column("key_id", NAME, nullable=False),
        sa.Column("pool", NAME, nullable=False),
        sa.Column("model", NAME, nullable=False),
        sa.Column("replica", NAME, nullable=False),
        sa.Column("boot_epoch", sa.BigInteger, nullable=False),
        sa.Column("started_at", AT, nullable=False),
        sa.Column("finished_at", AT, nullable=False),
        sa.Column("finish", NAME, nullable=False),
        sa.Column("basis", sa.String(16), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("kv_block_seconds", sa.Double, nullable=False),
        sa.Column("device_seconds", sa.Double, nullable=False),
        sa.Column("cost", sa.BigInteger),
        sa.Column("held_at", AT, server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_usage_held")),
    )
    op.create_index("ix_usage_held_replica_held_at", "usage_held", ["replica", "held_at"])
    op.create_index("ix_usage_held_tenant_finished_at", "usage_held", ["tenant", "finished_at"])
    op.add_column("replicas", sa.Column("usage_told_until", AT))
    op.add_column("gateways", sa.Column("spool_bytes", sa.BigInteger, server_default=ZERO, nullable=False))
    op.add_column("gateways", sa.Column("spool_full", sa.Boolean, server_default=FALSE, nullable=False))
    op.add_column("gateways", sa.Column("spool_oldest_at", AT))


def downgrade() -> None:
    for name in ("spool_bytes", "spool_full", "spool_oldest_at"):
        op.drop_column("gateways", name)
    op.drop_column("replicas", "usage_told_until")
    op.drop_table("usage_held")
    op.drop_column("usage_attempts", "by_gateway")
    for name in ("cost", "unpriced_attempts"):
        op.drop_column("usage_daily", name)
    op.drop_column("usage_ledger", "cost")
