"""Projects between tenants and keys, principals who own keys, scopes, rotation, and what a tenant's shares rest on.

Revision: 0003. Every tenant has one project named "default", and each key belongs to a project: keys that exist go to
the default one. `api_keys.identity` is the id of the first key of a chain of rotations: quotas of a key follow it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

NOW = sa.text("now()")
NEW_ID = sa.text("gen_random_uuid()")
AT = sa.DateTime(timezone=True)
NO_METADATA = sa.text("'{}'::jsonb")


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
    op.add_column("tenants", sa.Column("time_zone", sa.String(64), server_default="UTC", nullable=False))
    op.add_column("tenants", sa.Column("weight", sa.Double, server_default=sa.text("1"), nullable=False))
    op.add_column("tenants", sa.Column("floor_tokens_per_s", sa.Double, server_default=sa.text("0"), nullable=False))
    op.add_column("tenants", sa.Column("metadata", postgresql.JSONB, server_default=NO_METADATA, nullable=False))
    op.create_check_constraint(op.f("ck_tenants_weight"), "tenants", "weight >= 0.001 AND weight <= 1000")
    floor = "floor_tokens_per_s >= 0 AND floor_tokens_per_s <= 1000000000"
    op.create_check_constraint(op.f("ck_tenants_floor"), "tenants", floor)

    op.create_table(
        "projects",
        sa.Column("id", sa.Uuid, server_default=NEW_ID, nullable=False),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("slug", sa.String(40), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("allowed_models", sa.ARRAY(sa.Text), nullable=True),
        sa.Column("active", sa.Boolean, server_default=sa.text("true"), nullable=False),
        sa.Column("metadata", postgresql.JSONB, server_default=NO_METADATA, nullable=False),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("slug ~ '^[a-z0-9-]{1,40}$'", name=op.f("ck_projects_slug_shape")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_projects_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("tenant_id", "slug", name=op.f("uq_projects_tenant_id_slug")),
        sa.UniqueConstraint("tenant_id", "idempotency_key", name=op.f("uq_projects_tenant_id_idempotency_key")),
    )
    op.create_index("ix_projects_tenant_id_created_at_id", "projects", ["tenant_id", "created_at", "id"])
    op.create_table(
        "principals",
        sa.Column("id", sa.Uuid, server_default=NEW_ID, nullable=False),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("email", sa.String(254), nullable=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("active", sa.Boolean, server_default=sa.text("true"), nullable=False),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("kind IN ('service_account', 'person')", name=op.f("ck_principals_kind")),
        sa.CheckConstraint("role IN ('admin', 'member', 'viewer')", name=op.f("ck_principals_role")),
        sa.CheckConstraint("(kind = 'person') = (email IS NOT NULL)", name=op.f("ck_principals_email")),
        sa.CheckConstraint("email = lower(email)", name=op.f("ck_principals_email_case")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_principals_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_principals")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_principals_tenant_id_name")),
        sa.UniqueConstraint("tenant_id", "idempotency_key", name=op.f("uq_principals_tenant_id_idempotency_key")),
    )
    op.create_index("ix_principals_tenant_id_created_at_id", "principals", ["tenant_id", "created_at", "id"])

    op.execute("INSERT INTO projects (tenant_id, slug, name) SELECT id, 'default', 'Default' FROM tenants")
    op.add_column("api_keys", sa.Column("project_id", sa.Uuid, nullable=True))
    op.add_column("api_keys", sa.Column("principal_id", sa.Uuid, nullable=True))
    op.add_column("api_keys", sa.Column("identity", sa.String(11), nullable=True))
    op.add_column("api_keys", sa.Column("rotated_to", sa.String(11), nullable=True))
    op.add_column(
        "api_keys",
        sa.Column("scopes", sa.ARRAY(sa.Text), server_default=sa.text("'{inference,quota:read}'"), nullable=False),
    )
    op.add_column("api_keys", sa.Column("metadata", postgresql.JSONB, server_default=NO_METADATA, nullable=False))
    op.execute(
        "UPDATE api_keys SET identity = key_id, project_id = "
        "(SELECT id FROM projects WHERE projects.tenant_id = api_keys.tenant_id AND slug = 'default')"
    )
    op.alter_column("api_keys", "project_id", nullable=False)
    op.alter_column("api_keys", "identity", nullable=False)
    op.create_foreign_key(
        op.f("fk_api_keys_project_id_projects"), "api_keys", "projects", ["project_id"], ["id"], ondelete="CASCADE"
    )
    op.create_foreign_key(
        op.f("fk_api_keys_principal_id_principals"),
        "api_keys",
        "principals",
        ["principal_id"],
        ["id"],
        ondelete="SET NULL",
    )
    op.create_index(op.f("ix_api_keys_project_id"), "api_keys", ["project_id"])
    op.create_index(op.f("ix_api_keys_principal_id"), "api_keys", ["principal_id"])
    op.create_index(op.f("ix_api_keys_identity"), "api_keys", ["identity"])
    _watch("projects", "tenant_id")
    _watch("principals", "tenant_id")


def downgrade() -> None:
    for column in ("project_id", "principal_id", "identity", "rotated_to", "scopes", "metadata"):
        op.drop_column("api_keys", column)
    for table in ("principals", "projects"):
        op.drop_table(table)
    for column in ("time_zone", "weight", "floor_tokens_per_s", "metadata"):
        op.drop_column("tenants", column)
