"""One running product for all system tests that do it no lasting harm."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.product import Product


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.system)
            item.add_marker(pytest.mark.timeout(900))  # a guard against hanging, on a busy machine too


@pytest.fixture
def home() -> Iterator[Path]:
    """A home folder of this test's own."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-system-"))
    yield folder / "home"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def product() -> Iterator[Product]:
    """The product, started once, stopped in order at the end."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-system-"))
    running = Product(folder / "home")
    running.start()
    yield running
    status = running.stop()
    said = running.output.read_text()
    shutil.rmtree(folder, ignore_errors=True)
    assert status == 0, said
