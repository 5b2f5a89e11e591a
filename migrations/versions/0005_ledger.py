"""The usage ledger by day, what keeps an attempt to one row, and the daily sums.

Revision: 0005. `usage_ledger` becomes a table partitioned by the day (UTC) on which an attempt finished; rows of days
without a partition of their own lie in `usage_ledger_default`. A partitioned table cannot have a unique key without its
partition key, so `usage_attempts` holds each attempt id once and whoever inserts its row claims the id first.
`usage_daily` is the ledger summed by day. Rows that exist are moved, claimed and summed here, in this one transaction;
a control plane of an older version refuses reports meanwhile and after, and their senders keep them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

NOW = sa.text("now()")
AT = sa.DateTime(timezone=True)
NAME = sa.String(200)
DAYS_AHEAD = 14
LONGEST_STATEMENT = "1h"

COLUMNS = (
    "attempt_id, request_id, tenant, project, key_id, pool, model, replica, boot_epoch, started_at, finished_at, "
    "finish, basis, prompt_tokens, cached_tokens, output_tokens, kv_block_seconds, device_seconds, recorded_at"
)
_KEYS = "(finished_at AT TIME ZONE 'UTC')::date, tenant, project, key_id, model, pool, basis"


def _columns() -> list[sa.Column[object]]:
    return [
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
        sa.Column("recorded_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "prompt_tokens >= 0 AND cached_tokens >= 0 AND output_tokens >= 0", name=op.f("ck_usage_ledger_tokens")
        ),
        sa.CheckConstraint("cached_tokens <= prompt_tokens", name=op.f("ck_usage_ledger_cached")),
    ]


def _move_rows() -> None:
    op.execute(f"INSERT INTO usage_ledger ({COLUMNS}) SELECT {COLUMNS} FROM usage_ledger_before")  # noqa: S608


def _append_only() -> None:
    op.execute(
        "CREATE TRIGGER usage_ledger_append_only BEFORE UPDATE OR DELETE ON usage_ledger "
        "FOR EACH ROW EXECUTE FUNCTION tidegate_append_only()"
    )


def _set_aside_the_old_table(*indexes: str) -> None:
    op.execute("LOCK TABLE usage_ledger IN ACCESS EXCLUSIVE MODE")
    op.execute(f"SET LOCAL statement_timeout = '{LONGEST_STATEMENT}'")
    op.rename_table("usage_ledger", "usage_ledger_before")
    for index in indexes:
        op.execute(f"ALTER INDEX {index} RENAME TO {index}_before")


def _partitions() -> None:
    """One for each day that has rows, and those of the days to come."""
    op.execute("CREATE TABLE usage_ledger_default PARTITION OF usage_ledger DEFAULT")
    op.execute(
        f"""
DO $$
DECLARE day date;
BEGIN
  FOR day IN
    SELECT DISTINCT (finished_at AT TIME ZONE 'UTC')::date FROM usage_ledger_before
    UNION SELECT (now() AT TIME ZONE 'UTC')::date + n FROM generate_series(-1, {DAYS_AHEAD}) AS n
  LOOP
    EXECUTE format(
      'CREATE TABLE %I PARTITION OF usage_ledger FOR VALUES FROM (%L) TO (%L)',
      'usage_ledger_p' || to_char(day, 'YYYYMMDD'),
      day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC'
    );
  END LOOP;
END
$$
"""  # noqa: S608  # made of constants
    )


def _attempts() -> None:
    op.create_table(
        "usage_attempts",
        sa.Column("attempt_id", NAME, nullable=False),
        sa.Column("claimed_at", AT, server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_usage_attempts")),
    )
    op.execute("INSERT INTO usage_attempts (attempt_id) SELECT attempt_id FROM usage_ledger_before")
    op.create_index("ix_usage_attempts_claimed_at", "usage_attempts", ["claimed_at"])


def _daily() -> None:
    op.create_table(
        "usage_daily",
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("tenant", NAME, nullable=False),
        sa.Column("project", NAME, nullable=False),
        sa.Column("key_id", NAME, nullable=False),
        sa.Column("model", NAME, nullable=False),
        sa.Column("pool", NAME, nullable=False),
        sa.Column("basis", sa.String(16), nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("kv_block_seconds", sa.Numeric, nullable=False),
        sa.Column("device_seconds", sa.Numeric, nullable=False),
        sa.PrimaryKeyConstraint(
            "day", "tenant", "project", "key_id", "model", "pool", "basis", name=op.f("pk_usage_daily")
        ),
        postgresql_with={"fillfactor": 70},
    )
    op.create_index("ix_usage_daily_tenant_day", "usage_daily", ["tenant", "day"])
    op.execute(
        f"""
INSERT INTO usage_daily
SELECT {_KEYS}, count(*), sum(prompt_tokens), sum(cached_tokens), sum(output_tokens),
  sum(round(kv_block_seconds::numeric, 6)), sum(round(device_seconds::numeric, 6))
FROM usage_ledger_before GROUP BY {_KEYS}
"""  # noqa: S608  # made of constants
    )


def upgrade() -> None:
    _set_aside_the_old_table(
        "pk_usage_ledger", "ix_usage_ledger_finished_at_attempt_id", "ix_usage_ledger_tenant_finished_at_attempt_id"
    )
    op.create_table(
        "usage_ledger",
        *_columns(),
        sa.PrimaryKeyConstraint("finished_at", "attempt_id", name=op.f("pk_usage_ledger")),
        postgresql_partition_by="RANGE (finished_at)",
    )
    op.create_index(
        "ix_usage_ledger_tenant_finished_at_attempt_id", "usage_ledger", ["tenant", "finished_at", "attempt_id"]
    )
    _partitions()
    _move_rows()
    _attempts()
    _daily()
    _append_only()
    op.drop_table("usage_ledger_before")


def downgrade() -> None:
    _set_aside_the_old_table("pk_usage_ledger", "ix_usage_ledger_tenant_finished_at_attempt_id")
    op.create_table("usage_ledger", *_columns(), sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_usage_ledger")))
    op.create_index("ix_usage_ledger_finished_at_attempt_id", "usage_ledger", ["finished_at", "attempt_id"])
    op.create_index(
        "ix_usage_ledger_tenant_finished_at_attempt_id", "usage_ledger", ["tenant", "finished_at", "attempt_id"]
    )
    _move_rows()
    _append_only()
    for table in ("usage_ledger_before", "usage_attempts", "usage_daily"):
        op.drop_table(table)
