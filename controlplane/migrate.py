"""Bringing a database to the schema this version needs.

Layer: service. Runs Alembic from the installed package, wherever the working folder is; synchronous, for the
CLI, the bootstrap and tests. Never called on the request path.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, pool

import controlplane
from controlplane.db import driver_url
from controlplane.settings import Secret

SCRIPTS = Path(controlplane.__file__).parent.parent / "migrations"
"""Beside the package, both in a checkout and in an installed wheel."""


def alembic_config(url: Secret) -> Config:
    """Alembic's configuration without a file. The URL travels as an attribute: it is never interpolated or printed."""
    config = Config()
    config.set_main_option("script_location", SCRIPTS.as_posix().replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = driver_url(url.reveal(), "psycopg")
    return config


def head() -> str:
    """The newest revision this version ships."""
    revision = ScriptDirectory.from_config(alembic_config(Secret("postgresql://"))).get_current_head()
    if revision is None:
        raise FileNotFoundError(f"no migrations found under {SCRIPTS}")
    return revision


def upgrade(url: Secret, revision: str = "head") -> None:
    """Migrate the database at `url`; a database already there is left alone. Raises SQLAlchemyError."""
    command.upgrade(alembic_config(url), revision)


def current(url: Secret) -> str | None:
    """The revision the database is at, None when it was never migrated. Raises OperationalError when it is away."""
    engine = create_engine(driver_url(url.reveal(), "psycopg"), poolclass=pool.NullPool)
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()


def managed(name: str | None, kind: str, _: object) -> bool:
    """Alembic's `include_name`: everything but the ledger's partitions, which jobs make and drop."""
    return kind != "table" or name is None or not name.startswith("usage_ledger_")


def load_models() -> None:
    """Import every domain's `models` module, so that `Base.metadata` is complete."""
    for domain in pkgutil.iter_modules(controlplane.__path__):
        if domain.ispkg:
            names = {
                module.name for module in pkgutil.iter_modules([str(Path(controlplane.__file__).parent / domain.name)])
            }
            if "models" in names:
                importlib.import_module(f"controlplane.{domain.name}.models")
