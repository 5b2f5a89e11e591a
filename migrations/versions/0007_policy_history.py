"""The history of policy changes, when each epoch began, what tenants were refused, and what a request was given.

Revision: 0007. `tidegate_policy_changed` now also writes, in the transaction of the change itself, the time of the new
epoch and for tenants, quotas, raises, prices and objectives one row of `policy_changes`: who, what, before and after.
Who is the transaction's setting `tidegate.actor`, else the role that is connected; what it undoes is
`tidegate.restores`. No secret is in it: a tenant's cache salt is left out. Nor are the limits that canaries make and
remove all the time as their own tenant; they count in the epoch.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

AT = sa.DateTime(timezone=True)
CLOCK = sa.text("clock_timestamp()")
EMPTY = sa.text("''")

CHANGED = """
CREATE OR REPLACE FUNCTION tidegate_policy_changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  before jsonb;
  after jsonb;
  changed jsonb;
  fresh bigint;
BEGIN
  IF TG_LEVEL = 'ROW' AND TG_OP <> 'INSERT' THEN before := to_jsonb(OLD); END IF;
  IF TG_LEVEL = 'ROW' AND TG_OP <> 'DELETE' THEN after := to_jsonb(NEW); END IF;
  changed := coalesce(after, before, '{}'::jsonb);
  UPDATE policy_state SET epoch = epoch + 1, changed_at = now() WHERE id = 1 RETURNING epoch INTO fresh;
  INSERT INTO policy_epochs (epoch) VALUES (fresh) ON CONFLICT (epoch) DO UPDATE SET at = excluded.at;
  IF TG_LEVEL = 'ROW' AND TG_TABLE_NAME IN ('tenants', 'quotas', 'quota_grants', 'prices', 'slos') THEN
    PERFORM tidegate_policy_history(TG_TABLE_NAME, fresh, changed, before, after);
  END IF;
  PERFORM pg_notify('tidegate_policy', json_build_object(
    'table', TG_TABLE_NAME, 'id', coalesce(changed ->> TG_ARGV[0], ''), 'epoch', fresh)::text);
  RETURN NULL;
END
$$
"""

HISTORY = """
CREATE FUNCTION tidegate_policy_history(kind text, fresh bigint, changed jsonb, before jsonb, after jsonb)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  hidden text[] := ARRAY['cache_salt', 'idempotency_key'];
  whose text := CASE kind WHEN 'tenants' THEN changed ->> 'slug' ELSE changed ->> 'tenant' END;
BEGIN
  IF before - hidden - 'updated_at' = after - hidden - 'updated_at' THEN
    RETURN;
  END IF;
  IF kind = 'quota_grants' THEN
    SELECT tenant INTO whose FROM quotas WHERE id = (changed ->> 'quota_id')::uuid;
    IF whose IS NULL THEN
      SELECT slug INTO whose FROM tenants WHERE id = (changed ->> 'tenant_id')::uuid;
    END IF;
  END IF;
  IF whose = 'tidegate-probe' AND kind IN ('quotas', 'quota_grants') THEN
    RETURN;
  END IF;
  INSERT INTO policy_changes (epoch, who, object, row_id, tenant, before, after, restores) VALUES (
    fresh, left(coalesce(nullif(current_setting('tidegate.actor', true), ''), session_user), 254), kind,
    changed ->> 'id', whose, before - hidden, after - hidden,
    nullif(current_setting('tidegate.restores', true), '')::bigint);
END
$$
"""

BEFORE = """
CREATE OR REPLACE FUNCTION tidegate_policy_changed() RETURNS trigger LANGUAGE plpgsql AS $$
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


def _history() -> None:
    op.create_table(
        "policy_epochs",
        sa.Column("epoch", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("at", AT, server_default=CLOCK, nullable=False),
        sa.PrimaryKeyConstraint("epoch", name=op.f("pk_policy_epochs")),
    )
    op.create_table(
        "policy_changes",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("at", AT, server_default=CLOCK, nullable=False),
        sa.Column("who", sa.String(254), nullable=False),
        sa.Column("object", sa.String(40), nullable=False),
        sa.Column("row_id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(40), nullable=True),
        sa.Column("before", postgresql.JSONB, nullable=True),
        sa.Column("after", postgresql.JSONB, nullable=True),
        sa.Column("restores", sa.BigInteger, nullable=True),
        sa.CheckConstraint("before IS NOT NULL OR after IS NOT NULL", name=op.f("ck_policy_changes_something")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_changes")),
    )
    op.create_index("ix_policy_changes_object_row_id_id", "policy_changes", ["object", "row_id", "id"])
    op.create_index("ix_policy_changes_tenant_id", "policy_changes", ["tenant", "id"])
    op.create_index("ix_policy_changes_at", "policy_changes", ["at"])


def _refusals() -> None:
    op.create_table(
        "refusal_windows",
        sa.Column("tenant", sa.String(200), nullable=False),
        sa.Column("start", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("code", sa.String(200), nullable=False),
        sa.Column("quota_id", sa.String(200), nullable=False),
        sa.Column("instance", sa.String(200), nullable=False),
        sa.Column("boot_epoch", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(200), nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("latest", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant", "start", "code", "quota_id", "instance", "boot_epoch", name=op.f("pk_refusal_windows")
        ),
    )
    op.create_index("ix_refusal_windows_start", "refusal_windows", ["start"])


def upgrade() -> None:
    _history()
    op.execute(HISTORY)
    op.execute(CHANGED)
    _refusals()
    op.add_column("quota_requests", sa.Column("wanted", sa.BigInteger, nullable=True))
    op.add_column("quota_requests", sa.Column("given", sa.BigInteger, nullable=True))
    op.add_column("quota_requests", sa.Column("given_until", AT, nullable=True))
    op.execute("UPDATE quota_requests SET given = amount, given_until = until WHERE state = 'approved'")
    op.create_check_constraint(
        op.f("ck_quota_requests_given"), "quota_requests", "(state = 'approved') = (given IS NOT NULL)"
    )


def downgrade() -> None:
    op.drop_constraint(op.f("ck_quota_requests_given"), "quota_requests")
    for column in ("wanted", "given", "given_until"):
        op.drop_column("quota_requests", column)
    op.execute(BEFORE)
    op.execute("DROP FUNCTION tidegate_policy_history(text, bigint, jsonb, jsonb, jsonb)")
    for table in ("refusal_windows", "policy_changes", "policy_epochs"):
        op.drop_table(table)
