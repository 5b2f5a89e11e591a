"""Writes requirements.lock and requirements-dev.lock from what is installed beside this interpreter.

`make lock` calls it after installing the newest versions that pyproject.toml allows. Only the closure of the
declared dependencies is written, with exact versions and without a local build's suffix, so that the ordinary
registry serves every line.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
BUILD = ["editables", "hatchling", "packaging"]
"""Needed to install the project itself without build isolation."""
BESIDE = ["triton"]
"""Required by the accelerator builds of torch only; pinned for all, because kernels are compiled in tests."""
OLDER = {"async-timeout": 'python_full_version < "3.11.3"'}
"""Required on a Python older than the one that writes the locks, with the condition; `make lock` installs them too."""


def closure(requirements: list[str]) -> dict[str, str]:
    """Every distribution that `requirements` need on this machine, with its version."""
    found: dict[str, str] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        key = (name, frozenset(wanted.extras))
        if key in done:
            continue
        done.add(key)
        try:
            installed = distribution(wanted.name)
        except PackageNotFoundError:
            sys.exit(f"{wanted} is not installed; run `make lock`, not this script alone")
        found[name] = Version(installed.version).public
        for text in installed.requires or []:
            needed = Requirement(text)
            extras = [*wanted.extras, ""]
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return found


def write(path: Path, heading: str, pins: dict[str, str], include: str | None = None) -> None:
    lines = [
        f"# {heading}",
        "# Written by `make lock`; every version is exact.",
        *([f"-r {include}"] if include else []),
    ]
    conditions = {name: f" ; {OLDER[name]}" for name in OLDER}
    lines += [f"{name}=={version}{conditions.get(name, '')}" for name, version in sorted(pins.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write(f"{path.name}: {len(pins)} packages\n")


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    runtime = closure([*project["dependencies"], *extras["client"], *extras["parquet"], *BUILD, *BESIDE, *OLDER])
    development = closure(extras["dev"])
    write(ROOT / "requirements.lock", "What Tidegate runs with, its snippets and exports, too.", runtime)
    only_development = {name: version for name, version in development.items() if name not in runtime}
    write(
        ROOT / "requirements-dev.lock",
        "What the tests and checks need on top.",
        only_development,
        include="requirements.lock",
    )


if __name__ == "__main__":
    main()
