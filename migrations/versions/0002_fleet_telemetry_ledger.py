"""Pools, replicas and their events, telemetry windows, gateways, roll-up claims, the usage ledger.

Revision: 0002. Gateways are notified of every change to a pool and of what routing depends on in a replica,
not of each report. The ledger refuses UPDATE and DELETE: it is append-only whoever connects.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

NOW = sa.text("now()")
AT = sa.DateTime(timezone=True)
NAME = sa.String(200)
EMPTY = sa.text("''")
ROUTING = ("state", "url", "pool", "model", "boot_epoch")


def _policy_triggers() -> None:
    function = "EXECUTE FUNCTION tidegate_policy_changed"
    op.execute(
        f"CREATE TRIGGER pools_policy_changed AFTER INSERT OR UPDATE OR DELETE ON pools FOR EACH ROW {function}('name')"
    )
    op.execute(
        f"CREATE TRIGGER replicas_policy_changed AFTER INSERT OR DELETE ON replicas FOR EACH ROW {function}('id')"
    )
    before, after = (", ".join(f"{row}.{column}" for column in ROUTING) for row in ("OLD", "NEW"))
    op.execute(
        f"CREATE TRIGGER replicas_routing_changed AFTER UPDATE ON replicas FOR EACH ROW "
        f"WHEN (({before}) IS DISTINCT FROM ({after})) {function}('id')"
    )
    for table, column in (("pools", "name"), ("replicas", "id")):
        op.execute(
            f"CREATE TRIGGER {table}_policy_emptied AFTER TRUNCATE ON {table} FOR EACH STATEMENT {function}('{column}')"
        )


def _append_only() -> None:
    op.execute(
        """
CREATE FUNCTION tidegate_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'integrity_constraint_violation';
END
$$
"""
    )
    op.execute(
        "CREATE TRIGGER usage_ledger_append_only BEFORE UPDATE OR DELETE ON usage_ledger "
        "FOR EACH ROW EXECUTE FUNCTION tidegate_append_only()"
    )


def _fleet() -> None:
    op.create_table(
        "pools",
        sa.Column("name", NAME, nullable=False),
        sa.Column("model", NAME, nullable=False),
        sa.Column("backend", sa.String(40), server_default=sa.text("'native'"), nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_pools")),
    )
    op.create_table(
        "replicas",
        sa.Column("id", NAME, nullable=False),
        sa.Column("pool", NAME, nullable=False),
        sa.Column("model", NAME, nullable=False),
        sa.Column("url", sa.String(500), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("state_reason", sa.String(500), server_default=EMPTY, nullable=False),
        sa.Column("state_since", AT, server_default=NOW, nullable=False),
        sa.Column("drain_wanted", sa.Boolean, server_default=sa.text("false"), nullable=False),
        sa.Column("boot_epoch", sa.BigInteger, nullable=False),
        sa.Column("core_epoch", sa.BigInteger, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("core_restarts", sa.Integer, nullable=False),
        sa.Column("policy_epoch", sa.BigInteger, nullable=False),
        sa.Column("started_at", AT, nullable=False),
        sa.Column("last_report_at", AT, nullable=False),
        sa.Column("ready", sa.LargeBinary, nullable=True),
        sa.Column("registered_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "state IN ('starting', 'ready', 'draining', 'failed', 'stale', 'lost')", name=op.f("ck_replicas_state")
        ),
        sa.ForeignKeyConstraint(["pool"], ["pools.name"], name=op.f("fk_replicas_pool_pools")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
        postgresql_with={"fillfactor": 50},
    )
    op.create_index(op.f("ix_replicas_pool"), "replicas", ["pool"])
    op.create_table(
        "replica_events",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("replica", NAME, nullable=False),
        sa.Column("at", AT, server_default=NOW, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("before", sa.String(16), server_default=EMPTY, nullable=False),
        sa.Column("after", sa.String(16), server_default=EMPTY, nullable=False),
        sa.Column("reason", sa.String(500), server_default=EMPTY, nullable=False),
        sa.Column("boot_epoch", sa.BigInteger, nullable=False),
        sa.Column("core_epoch", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(
            ["replica"], ["replicas.id"], name=op.f("fk_replica_events_replica_replicas"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replica_events")),
    )
    op.create_index("ix_replica_events_replica_at", "replica_events", ["replica", "at"])
    op.create_index("ix_replica_events_at", "replica_events", ["at"])


def _telemetry() -> None:
    op.create_table(
        "telemetry_windows",
        sa.Column("resolution", sa.SmallInteger, autoincrement=False, nullable=False),
        sa.Column("start", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("source", sa.String(8), nullable=False),
        sa.Column("instance", NAME, nullable=False),
        sa.Column("boot_epoch", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("pool", NAME, nullable=False),
        sa.Column("replica", NAME, nullable=False),
        sa.Column("tenant", NAME, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("recorded_at", AT, server_default=NOW, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.CheckConstraint("resolution IN (10, 60, 3600)", name=op.f("ck_telemetry_windows_resolution")),
        sa.CheckConstraint("source IN ('engine', 'gateway')", name=op.f("ck_telemetry_windows_source")),
        sa.CheckConstraint("start % resolution = 0", name=op.f("ck_telemetry_windows_aligned")),
        sa.PrimaryKeyConstraint(
            "resolution",
            "start",
            "source",
            "instance",
            "boot_epoch",
            "pool",
            "replica",
            "tenant",
            name=op.f("pk_telemetry_windows"),
        ),
    )
    op.create_table(
        "gateways",
        sa.Column("id", NAME, nullable=False),
        sa.Column("boot_epoch", sa.BigInteger, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("policy_epoch", sa.BigInteger, nullable=False),
        sa.Column("in_flight", sa.Integer, nullable=False),
        sa.Column("started_at", AT, nullable=False),
        sa.Column("last_report_at", AT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gateways")),
    )
    op.create_table(
        "rollup_claims",
        sa.Column("job", sa.String(20), nullable=False),
        sa.Column("window_start", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("touched", sa.BigInteger, server_default=sa.text("1"), nullable=False),
        sa.Column("done", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("fence", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("holder", NAME, nullable=True),
        sa.Column("expires_at", AT, nullable=True),
        sa.Column("finished_at", AT, nullable=True),
        sa.PrimaryKeyConstraint("job", "window_start", name=op.f("pk_rollup_claims")),
    )
    op.create_index(
        "ix_rollup_claims_due", "rollup_claims", ["job", "window_start"], postgresql_where=sa.text("touched > done")
    )


def _ledger() -> None:
    op.create_table(
        "usage_ledger",
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
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_usage_ledger")),
    )
    op.create_index("ix_usage_ledger_finished_at_attempt_id", "usage_ledger", ["finished_at", "attempt_id"])
    op.create_index(
        "ix_usage_ledger_tenant_finished_at_attempt_id", "usage_ledger", ["tenant", "finished_at", "attempt_id"]
    )
    op.create_table(
        "usage_refused",
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("replica", NAME, nullable=False),
        sa.Column("reason", sa.String(1000), nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("refused_at", AT, server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_usage_refused")),
    )
    op.create_index(op.f("ix_usage_refused_refused_at"), "usage_refused", ["refused_at"])


def upgrade() -> None:
    _fleet()
    _telemetry()
    _ledger()
    _policy_triggers()
    _append_only()


def downgrade() -> None:
    for table in (
        "usage_refused",
        "usage_ledger",
        "rollup_claims",
        "gateways",
        "telemetry_windows",
        "replica_events",
        "replicas",
        "pools",
    ):
        op.drop_table(table)
    op.execute("DROP FUNCTION tidegate_append_only()")
