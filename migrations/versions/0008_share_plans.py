"""What a pool's replicas hold, as an operator says, and the share plans in force.

Revision: 0008. `share_plans` has one row for each planned pool; a row is only ever replaced by one of a later window
and a higher epoch. It is no policy that operators set: planning announces it, and leaves the policy's epoch alone.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

ZERO = sa.text("0")


def upgrade() -> None:
    op.add_column("pools", sa.Column("replica_slots", sa.Integer, server_default=ZERO, nullable=False))
    op.add_column("pools", sa.Column("replica_tokens", sa.BigInteger, server_default=ZERO, nullable=False))
    op.create_check_constraint(op.f("ck_pools_size"), "pools", "replica_slots >= 0 AND replica_tokens >= 0")
    op.create_table(
        "share_plans",
        sa.Column("pool", sa.String(200), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("window_start", sa.BigInteger, nullable=False),
        sa.Column("plan", sa.LargeBinary, nullable=False),
        sa.Column("reasons", sa.dialects.postgresql.ARRAY(sa.Text), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("planned_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("epoch > 0", name=op.f("ck_share_plans_epoch")),
        sa.ForeignKeyConstraint(["pool"], ["pools.name"], name=op.f("fk_share_plans_pool_pools"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("pool", name=op.f("pk_share_plans")),
    )


def downgrade() -> None:
    op.drop_table("share_plans")
    op.drop_constraint(op.f("ck_pools_size"), "pools")
    op.drop_column("pools", "replica_tokens")
    op.drop_column("pools", "replica_slots")
