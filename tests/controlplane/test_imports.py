"""The control plane never loads torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]

WALK = """
import importlib, pkgutil, sys
import controlplane
found = pkgutil.walk_packages(controlplane.__path__, "controlplane.")
names = [module.name for module in found if not module.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "triton"})
print(len(names), *heavy)
"""


def test_after_importing_every_module_of_the_control_plane_torch_is_not_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", WALK],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count, *heavy = done.stdout.split()
    assert int(count) > 60
    assert heavy == []


def test_the_walk_notices_torch() -> None:
    """The control: the same walk says so when something does load it."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "import types, sys; sys.modules['torch'] = types.ModuleType('torch')" + WALK,
        ],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split()[1:] == ["torch"], done.stderr


def test_the_command_lists_its_commands_without_loading_any() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from controlplane.cli import main; "
        "print(CliRunner().invoke(main, ['--help']).exit_code, "
        "*sorted({'sqlalchemy', 'litestar', 'celery', 'torch', 'dataplane'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0"], done.stdout + done.stderr
