"""Fixtures of the benches' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataplane.bench.traces import Traces

PUBLIC = Path(__file__).parents[3].parent / "shared" / "traces"


@pytest.fixture
def public_traces() -> Traces:
    """The public traces, which the project does not ship."""
    if not PUBLIC.is_dir():
        pytest.skip("the public traces are not beside this checkout (../shared/traces)")
    return Traces(PUBLIC)
