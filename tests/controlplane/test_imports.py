"""What an import of the control plane brings along."""

from __future__ import annotations

import subprocess
import sys

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import controlplane
names = [module.name for module in pkgutil.walk_packages(controlplane.__path__, "controlplane.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
heavy = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "triton", "transformers"})
print(len(names), *heavy)
"""


def test_importing_every_control_plane_module_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", IMPORT_EVERYTHING],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count, *heavy = done.stdout.split()
    assert int(count) > 40
    assert heavy == []


def test_the_command_lists_its_commands_without_loading_any() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from controlplane.cli import main; "
        "print(CliRunner().invoke(main, ['--help']).exit_code, "
        "*sorted({'sqlalchemy', 'litestar', 'celery', 'torch', 'dataplane'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0"], done.stdout + done.stderr
