"""When those are told to come back whom no replica can serve: what starting replicas and their reports let expect."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from controlplane.fleet.schemas import FleetView, PoolRoute, ReplicaRoute
from controlplane.gateway.fleet import LONGEST_START_S, NEXT_REPORT_S, FleetDirectory
from dataplane.protocol import ReplicaState

STARTING, READY, FAILED = ReplicaState.STARTING, ReplicaState.READY, ReplicaState.FAILED


class Told:
    """A directory that is told of the fleet, and what it tells those it has nothing for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.directory = FleetDirectory(self._away, clock=lambda: self.now)

    async def _away(self) -> FleetView:
        raise ConnectionRefusedError

    def sees(self, now: float, states: Mapping[str, ReplicaState]) -> None:
        self.now = now
        pools = [PoolRoute(name=pool, model=pool, backend="native", created_at=1.0) for pool in ("m", "other")]
        replicas = [
            ReplicaRoute(replica=name, pool=name.split("-")[0], url="http://127.0.0.1:1", state=state, boot_epoch=1)
            for name, state in states.items()
        ]
        self.directory.adopt(FleetView(epoch=1, pools=pools, replicas=replicas))

    def wait_s(self, model: str = "m", *, at: float) -> int:
        self.now = at
        error = self.directory.no_capacity(model)
        assert (error.status, error.code) == (503, "no_capacity")
        return int(error.headers["retry-after"])


@pytest.mark.parametrize("states", [{}, {"m-0": FAILED}, {"other-0": STARTING}])
def test_where_nothing_starts_the_next_report_is_waited_for(states: dict[str, ReplicaState]) -> None:
    told = Told()
    told.sees(0.0, states)
    assert told.wait_s(at=100.0) == NEXT_REPORT_S


def test_a_first_start_is_expected_to_take_as_long_again_within_a_bound() -> None:
    told = Told()
    told.sees(0.0, {"m-0": STARTING})
    assert [told.wait_s(at=at) for at in (0.0, 4.2, 30.0, 1000.0)] == [1, 5, 30, LONGEST_START_S]


def test_a_start_is_expected_to_take_what_those_before_took() -> None:
    told = Told()
    for number, took in enumerate((20.0, 22.0, 90.0)):
        told.sees(1000.0 * number, {"m-0": STARTING})
        told.sees(1000.0 * number + took, {"m-0": READY})
    told.sees(5000.0, {"m-0": STARTING, "other-0": STARTING})
    assert [told.wait_s(at=5000.0 + at) for at in (0.0, 10.0, 21.5, 30.0)] == [22, 12, 1, 30]
    assert told.wait_s("other", at=5003.0) == 3


def test_of_several_that_start_the_first_counts_and_one_that_failed_counts_no_more() -> None:
    told = Told()
    told.sees(0.0, {"m-0": STARTING})
    told.sees(10.0, {"m-0": READY})
    told.sees(100.0, {"m-0": STARTING})
    told.sees(106.0, {"m-0": STARTING, "m-1": STARTING})
    assert told.wait_s(at=107.0) == 3
    told.sees(108.0, {"m-0": FAILED, "m-1": STARTING})
    assert told.wait_s(at=108.0) == 8
