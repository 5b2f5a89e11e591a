"""What the host bench says: a small run whose parts add up, and cases that cannot be."""

from __future__ import annotations

import pytest

from dataplane.bench.host import PARTS, HostCase, run
from dataplane.bench.report import document_of
from dataplane.config import ConfigError

SMALL = {"threads": 2, "batch": 4, "long": 160, "steps": 6, "rounds": 1}


def test_a_run_splits_each_step_and_compares_histories() -> None:
    told: list[str] = []
    report = run(HostCase("smollm2", **SMALL), told.append)
    for name, history in (("short", 64), ("long", 160)):
        found = report.results[name]
        assert found["history"] == history
        assert sum(found["parts_ms"].values()) == pytest.approx(found["host_ms"])
        assert set(found["parts_ms"]) == set(PARTS)
        assert 0 < found["host_ms"] < found["step_ms"]
        assert found["share"] == pytest.approx(found["host_ms"] / found["step_ms"])
    assert report.results["long_over_short"]["median"] > 0
    assert report.results["control"]["lower"] is None, "one round has no interval"
    assert len(told) == 6
    assert {"machine", "versions", "seed", "case_id"} <= set(document_of(report))


@pytest.mark.parametrize("wrong", [{"short": 32}, {"short": 200}, {"long": 9000}, {"forward": "fast"}])
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        run(HostCase("smollm2", **{**SMALL, **wrong}))  # type: ignore[arg-type]
