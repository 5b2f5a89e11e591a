"""Tenants, API keys, the policy epoch with its trigger, operators, sessions and admin tokens.

Revision: 0001, the first. `tidegate_policy_changed(<id column>)` is the trigger function of every policy table:
it bumps `policy_state.epoch` and notifies `tidegate_policy` with {"table", "id", "epoch"} at commit. Later
revisions attach it to their own tables with `CREATE TRIGGER ... EXECUTE FUNCTION tidegate_policy_changed('<column>')`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NOW = sa.text("now()")
NEW_ID = sa.text("gen_random_uuid()")
AT = sa.DateTime(timezone=True)

POLICY_FUNCTION = """
CREATE FUNCTION tidegate_policy_changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  changed jsonb;
  fresh bigint;
BEGIN
  IF TG_LEVEL = 'STATEMENT' THEN
    changed := '{}'::jsonb;
  ELSIF TG_OP = 'DELETE' THEN
    changed := to_jsonb(OLD);
  ELSE
    changed := to_jsonb(NEW);
  END IF;
  UPDATE policy_state SET epoch = epoch + 1, changed_at = now() WHERE id = 1 RETURNING epoch INTO fresh;
  PERFORM pg_notify('tidegate_policy', json_build_object(
    'table', TG_TABLE_NAME, 'id', coalesce(changed ->> TG_ARGV[0], ''), 'epoch', fresh)::text);
  RETURN NULL;
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


def upgrade() -> None:
    op.create_table(
        "policy_state",
        sa.Column("id", sa.SmallInteger, autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("changed_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_policy_state_single_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_state")),
    )
    op.execute("INSERT INTO policy_state (id) VALUES (1)")
    op.execute(POLICY_FUNCTION)

    op.create_table(
        "tenants",
        sa.Column("id", sa.Uuid, server_default=NEW_ID, nullable=False),
        sa.Column("slug", sa.String(40), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("cache_salt", sa.String(64), nullable=False),
        sa.Column("allowed_models", sa.ARRAY(sa.Text), nullable=True),
        sa.Column("active", sa.Boolean, server_default=sa.text("true"), nullable=False),
        sa.Column("priority", sa.SmallInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("slug ~ '^[a-z0-9-]{1,40}$'", name=op.f("ck_tenants_slug_shape")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("slug", name=op.f("uq_tenants_slug")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_tenants_idempotency_key")),
    )
    op.create_index("ix_tenants_created_at_id", "tenants", ["created_at", "id"])
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(11), nullable=False),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary, nullable=False),
        sa.Column("last4", sa.String(4), nullable=False),
        sa.Column("allowed_models", sa.ARRAY(sa.Text), nullable=True),
        sa.Column("expires_at", AT, nullable=True),
        sa.Column("revoked_at", AT, nullable=True),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("tenant_id", "idempotency_key", name=op.f("uq_api_keys_tenant_id_idempotency_key")),
    )
    op.create_index("ix_api_keys_tenant_id_created_at_key_id", "api_keys", ["tenant_id", "created_at", "key_id"])
    _watch("tenants", "id")
    _watch("api_keys", "key_id")

    op.create_table(
        "users",
        sa.Column("id", sa.Uuid, server_default=NEW_ID, nullable=False),
        sa.Column("email", sa.String(254), nullable=False),
        sa.Column("password_hash", sa.Text, nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("active", sa.Boolean, server_default=sa.text("true"), nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("last_login_at", AT, nullable=True),
        sa.CheckConstraint("role IN ('operator', 'viewer')", name=op.f("ck_users_role")),
        sa.CheckConstraint("email = lower(email)", name=op.f("ck_users_email_case")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email", name=op.f("uq_users_email")),
    )
    op.create_table(
        "user_sessions",
        sa.Column("token_hash", sa.LargeBinary, nullable=False),
        sa.Column("user_id", sa.Uuid, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("last_seen_at", AT, server_default=NOW, nullable=False),
        sa.Column("expires_at", AT, nullable=False),
        sa.ForeignKeyConstraint(
            ["user_id"], ["users.id"], name=op.f("fk_user_sessions_user_id_users"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("token_hash", name=op.f("pk_user_sessions")),
    )
    op.create_index(op.f("ix_user_sessions_user_id"), "user_sessions", ["user_id"])
    op.create_index(op.f("ix_user_sessions_expires_at"), "user_sessions", ["expires_at"])
    op.create_table(
        "api_tokens",
        sa.Column("id", sa.Uuid, server_default=NEW_ID, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("token_hash", sa.LargeBinary, nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("expires_at", AT, nullable=True),
        sa.Column("revoked_at", AT, nullable=True),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("role IN ('operator', 'viewer')", name=op.f("ck_api_tokens_role")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_tokens")),
        sa.UniqueConstraint("name", name=op.f("uq_api_tokens_name")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_api_tokens_token_hash")),
    )


def downgrade() -> None:
    for table in ("api_tokens", "user_sessions", "users", "api_keys", "tenants"):
        op.drop_table(table)
    op.execute("DROP FUNCTION tidegate_policy_changed()")
    op.drop_table("policy_state")
