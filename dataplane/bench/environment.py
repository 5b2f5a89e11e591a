"""Throw-away environments for peers, and commands run in them.

Layer: service. Whatever cannot be had is said in one sentence. It knows no peer by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dataplane.bench.errors import NotToBeHadError

INSTALL_S = 3600.0
DONE = "installed.json"
"""Written last, with what was asked for: an environment that was broken off is made anew."""


class Environments:
    """One folder for each peer inside `folder`, which somebody else removes, or keeps for the next run."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.folder = folder
        self.tell = tell

    def python(self, name: str, requirements: Sequence[str], *, without: Sequence[str] = ()) -> Path:
        """The interpreter of an environment that has `requirements`, `without` some of their dependencies.

        Raises NotToBeHadError.
        """
        home = self.folder / name
        python = home / "bin" / "python"
        if not self.has(name, requirements):
            self.tell(f"installing {name} into an environment of its own (minutes)")
            run([sys.executable, "-m", "venv", "--clear", str(home)], f"make an environment for {name}")
            pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
            run([*pip, "install", "--quiet", *requirements], f"install {name}")
            if without:
                run([*pip, "uninstall", "--quiet", "--yes", *without], f"leave out {', '.join(without)}")
            self.finished(name, requirements)
        return python

    def has(self, name: str, what: Sequence[str]) -> bool:
        """Whether an earlier run has finished `name` with just this."""
        try:
            return bool(json.loads((self.folder / name / DONE).read_text()) == list(what))
        except (OSError, ValueError):
            return False

    def finished(self, name: str, what: Sequence[str]) -> None:
        (self.folder / name / DONE).write_text(json.dumps(list(what)))


def version_of(python: Path, package: str) -> str:
    """The version of `package` in that environment. Raises NotToBeHadError."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return run([str(python), "-c", code], f"ask for the version of {package}").splitlines()[-1]


def run(
    command: Sequence[str],
    what: str,
    *,
    environment: Mapping[str, str] | None = None,
    within_s: float = INSTALL_S,
) -> str:
    """What `command` printed. Raises NotToBeHadError: "cannot" and `what`. Nothing it started stays behind, however
    this ends."""
    try:
        process = subprocess.Popen(  # noqa: S603 - fixed argument lists, no shell
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    except OSError as error:
        raise NotToBeHadError(f"cannot {what}: {error}") from None
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        raise NotToBeHadError(f"cannot {what}: it took more than {within_s:.0f} s") from None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        said = [line.strip() for line in (err or out).splitlines() if line.strip() and not line.startswith("WARNING")]
        raise NotToBeHadError(f"cannot {what}: {(said or [f'exit code {process.returncode}'])[-1][:300]}")
    return out.strip()
