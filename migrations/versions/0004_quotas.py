"""Quotas with their temporary raises, prices, requests for more, and service level objectives.

Revision: 0004. Gateways are notified of every change of a quota, a raise, a price or an objective; a tenant's request
for more changes nothing until somebody approves it, so it notifies nobody. Prices keep their history whoever connects:
rows of one pool never overlap, a price that has been in force is never changed or deleted, only ended now or later.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

NOW = sa.text("now()")
NEW_ID = sa.text("gen_random_uuid()")
EMPTY = sa.text("''")
AT = sa.DateTime(timezone=True)
KINDS = (
    "kind IN ('requests_per_minute', 'tokens_per_minute', 'input_tokens_per_minute', "
    "'uncached_input_tokens_per_minute', 'output_tokens_per_minute', 'concurrent_requests', 'tokens_per_day', "
    "'tokens_per_month', 'money_per_day', 'money_per_month', 'max_prompt_tokens', 'max_output_tokens')"
)

PRICE_FUNCTION = """
CREATE FUNCTION tidegate_price_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'DELETE' THEN
    IF OLD.valid_from <= now() THEN
      RAISE EXCEPTION 'a price that has been in force is never deleted' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN OLD;
  END IF;
  IF TG_OP = 'UPDATE' AND (
    (to_jsonb(NEW) - 'valid_until') <> (to_jsonb(OLD) - 'valid_until')
    OR (OLD.valid_until IS NOT NULL AND OLD.valid_until <= now())
    OR (NEW.valid_until IS NOT NULL AND NEW.valid_until < now())
  ) THEN
    RAISE EXCEPTION 'a price may only be ended, now or later' USING ERRCODE = 'restrict_violation';
  END IF;
  PERFORM pg_advisory_xact_lock(hashtextextended('tidegate price of ' || NEW.pool, 0));
  IF EXISTS (
    SELECT FROM prices p WHERE p.pool = NEW.pool AND p.id <> NEW.id
    AND tstzrange(p.valid_from, p.valid_until) && tstzrange(NEW.valid_from, NEW.valid_until)
  ) THEN
    RAISE EXCEPTION 'two prices of one pool may not overlap' USING ERRCODE = 'exclusion_violation';
  END IF;
  RETURN NEW;
END
$$
"""


def _watch(table: str, id_column: str) -> None:
    op.execute(
        f"CREATE TRIGGER {table}_policy_changed AFTER INSERT OR UPDATE OR DELETE ON {table} "
        f"FOR EACH ROW EXECUTE FUNCTION tidegate_policy_changed('{id_column}')"
    )
    op.execute(
        f"CREATE TRIGGER {table}_policy_emptied AFTER TRUNCATE ON {table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION tidegate_policy_changed('{id_column}')"
    )


def _id() -> sa.Column[object]:
    return sa.Column("id", sa.Uuid, server_default=NEW_ID, nullable=False)


def _to(table: str, column: str, target: str, ondelete: str = "CASCADE") -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_{table}_{column}_{target}")
    return sa.ForeignKeyConstraint([column], [f"{target}.id"], name=name, ondelete=ondelete)


def _quotas() -> None:
    op.create_table(
        "quotas",
        _id(),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("tenant", sa.String(40), nullable=False),
        sa.Column("project_id", sa.Uuid, nullable=True),
        sa.Column("project", sa.String(40), nullable=True),
        sa.Column("key_identity", sa.String(11), nullable=True),
        sa.Column("model", sa.String(200), server_default=EMPTY, nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("soft", sa.BigInteger, nullable=True),
        sa.Column("hard", sa.BigInteger, nullable=True),
        sa.Column("away", sa.String(8), server_default=sa.text("'closed'"), nullable=False),
        sa.Column("local", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("updated_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint(KINDS, name=op.f("ck_quotas_kind")),
        sa.CheckConstraint("away IN ('closed', 'local', 'open')", name=op.f("ck_quotas_away")),
        sa.CheckConstraint("project_id IS NULL OR key_identity IS NULL", name=op.f("ck_quotas_one_scope")),
        sa.CheckConstraint("soft IS NOT NULL OR hard IS NOT NULL", name=op.f("ck_quotas_limits_something")),
        sa.CheckConstraint("soft >= 0 AND hard >= 0 AND soft <= hard", name=op.f("ck_quotas_amounts")),
        sa.CheckConstraint("CASE WHEN away = 'local' THEN local > 0 ELSE local = 0 END", name=op.f("ck_quotas_local")),
        _to("quotas", "tenant_id", "tenants"),
        _to("quotas", "project_id", "projects"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quotas")),
        sa.UniqueConstraint(
            "tenant_id",
            "project_id",
            "key_identity",
            "model",
            "kind",
            name=op.f("uq_quotas_tenant_id_project_id_key_identity_model_kind"),
            postgresql_nulls_not_distinct=True,
        ),
        sa.UniqueConstraint("tenant_id", "idempotency_key", name=op.f("uq_quotas_tenant_id_idempotency_key")),
    )
    op.create_index("ix_quotas_tenant_id_created_at_id", "quotas", ["tenant_id", "created_at", "id"])
    op.create_index(op.f("ix_quotas_project_id"), "quotas", ["project_id"])
    op.create_table(
        "quota_grants",
        _id(),
        sa.Column("quota_id", sa.Uuid, nullable=False),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("starts_at", AT, nullable=False),
        sa.Column("expires_at", AT, nullable=False),
        sa.Column("reason", sa.String(500), nullable=False),
        sa.Column("granted_by", sa.String(254), nullable=False),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("amount > 0", name=op.f("ck_quota_grants_amount")),
        sa.CheckConstraint("starts_at <= expires_at", name=op.f("ck_quota_grants_span")),
        _to("quota_grants", "quota_id", "quotas"),
        _to("quota_grants", "tenant_id", "tenants"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quota_grants")),
        sa.UniqueConstraint("quota_id", "idempotency_key", name=op.f("uq_quota_grants_quota_id_idempotency_key")),
    )
    op.create_index("ix_quota_grants_quota_id_created_at_id", "quota_grants", ["quota_id", "created_at", "id"])
    op.create_index(op.f("ix_quota_grants_tenant_id"), "quota_grants", ["tenant_id"])


def _requests() -> None:
    op.create_table(
        "quota_requests",
        _id(),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("tenant", sa.String(40), nullable=False),
        sa.Column("quota_id", sa.Uuid, nullable=True),
        sa.Column("project", sa.String(40), nullable=True),
        sa.Column("key_identity", sa.String(11), nullable=True),
        sa.Column("model", sa.String(200), server_default=EMPTY, nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("until", AT, nullable=True),
        sa.Column("reason", sa.String(500), nullable=False),
        sa.Column("asked_by", sa.String(254), nullable=False),
        sa.Column("state", sa.String(8), server_default=sa.text("'open'"), nullable=False),
        sa.Column("decided_by", sa.String(254), nullable=True),
        sa.Column("decided_at", AT, nullable=True),
        sa.Column("note", sa.String(500), server_default=EMPTY, nullable=False),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint(KINDS, name=op.f("ck_quota_requests_kind")),
        sa.CheckConstraint("amount > 0", name=op.f("ck_quota_requests_amount")),
        sa.CheckConstraint("state IN ('open', 'approved', 'declined')", name=op.f("ck_quota_requests_state")),
        sa.CheckConstraint("(state = 'open') = (decided_at IS NULL)", name=op.f("ck_quota_requests_decided")),
        _to("quota_requests", "tenant_id", "tenants"),
        _to("quota_requests", "quota_id", "quotas", "SET NULL"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quota_requests")),
        sa.UniqueConstraint("tenant_id", "idempotency_key", name=op.f("uq_quota_requests_tenant_id_idempotency_key")),
    )
    order = ["created_at", "id"]
    op.create_index("ix_quota_requests_created_at_id", "quota_requests", order)
    op.create_index("ix_quota_requests_tenant_id_created_at_id", "quota_requests", ["tenant_id", *order])
    op.create_index("ix_quota_requests_open", "quota_requests", order, postgresql_where=sa.text("state = 'open'"))
    op.create_index(op.f("ix_quota_requests_quota_id"), "quota_requests", ["quota_id"])


def _prices() -> None:
    op.create_table(
        "prices",
        _id(),
        sa.Column("pool", sa.String(200), server_default=EMPTY, nullable=False),
        sa.Column("uncached_input", sa.BigInteger, nullable=False),
        sa.Column("cached_input", sa.BigInteger, nullable=False),
        sa.Column("output", sa.BigInteger, nullable=False),
        sa.Column("device_second", sa.BigInteger, nullable=False),
        sa.Column("valid_from", AT, nullable=False),
        sa.Column("valid_until", AT, nullable=True),
        sa.Column("set_by", sa.String(254), nullable=False),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "uncached_input >= 0 AND cached_input >= 0 AND output >= 0 AND device_second >= 0",
            name=op.f("ck_prices_amounts"),
        ),
        sa.CheckConstraint("valid_from < valid_until", name=op.f("ck_prices_span")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prices")),
        sa.UniqueConstraint("pool", "valid_from", name=op.f("uq_prices_pool_valid_from")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_prices_idempotency_key")),
    )
    op.create_index("ix_prices_valid_from_id", "prices", ["valid_from", "id"])
    op.execute(PRICE_FUNCTION)
    op.execute(
        "CREATE TRIGGER prices_history BEFORE INSERT OR UPDATE OR DELETE ON prices "
        "FOR EACH ROW EXECUTE FUNCTION tidegate_price_history()"
    )


def _slos() -> None:
    op.create_table(
        "slos",
        _id(),
        sa.Column("tenant_id", sa.Uuid, nullable=True),
        sa.Column("tenant", sa.String(40), nullable=True),
        sa.Column("pool", sa.String(200), server_default=EMPTY, nullable=False),
        sa.Column("class", sa.String(40), server_default=EMPTY, nullable=False),
        sa.Column("ttft_ms", sa.Integer, nullable=True),
        sa.Column("ttft_share", sa.Double, nullable=True),
        sa.Column("tpot_ms", sa.Double, nullable=True),
        sa.Column("tpot_share", sa.Double, nullable=True),
        sa.Column("availability", sa.Double, nullable=True),
        sa.Column("window_days", sa.SmallInteger, server_default=sa.text("30"), nullable=False),
        sa.Column("enabled", sa.Boolean, server_default=sa.text("true"), nullable=False),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("updated_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("(ttft_ms IS NULL) = (ttft_share IS NULL)", name=op.f("ck_slos_ttft")),
        sa.CheckConstraint("(tpot_ms IS NULL) = (tpot_share IS NULL)", name=op.f("ck_slos_tpot")),
        sa.CheckConstraint("ttft_ms > 0 AND tpot_ms > 0", name=op.f("ck_slos_latencies")),
        sa.CheckConstraint(
            "ttft_share > 0 AND ttft_share < 1 AND tpot_share > 0 AND tpot_share < 1 "
            "AND availability > 0 AND availability < 1",
            name=op.f("ck_slos_shares"),
        ),
        sa.CheckConstraint(
            "coalesce(ttft_share, tpot_share, availability) IS NOT NULL", name=op.f("ck_slos_promises_something")
        ),
        sa.CheckConstraint("window_days BETWEEN 1 AND 90", name=op.f("ck_slos_window")),
        _to("slos", "tenant_id", "tenants"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slos")),
        sa.UniqueConstraint(
            "tenant_id",
            "pool",
            "class",
            name=op.f("uq_slos_tenant_id_pool_class"),
            postgresql_nulls_not_distinct=True,
        ),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_slos_idempotency_key")),
    )
    op.create_index("ix_slos_created_at_id", "slos", ["created_at", "id"])


def upgrade() -> None:
    _quotas()
    _requests()
    _prices()
    _slos()
    for table in ("quotas", "quota_grants", "slos"):
        _watch(table, "tenant_id")
    _watch("prices", "pool")


def downgrade() -> None:
    for table in ("slos", "prices", "quota_requests", "quota_grants", "quotas"):
        op.drop_table(table)
    op.execute("DROP FUNCTION tidegate_price_history()")
