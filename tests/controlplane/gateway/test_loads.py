"""What routing is told of each replica: own counts always, others' while they are fresh (F19)."""

from __future__ import annotations

import asyncio

import pytest

from controlplane.fleet.schemas import FleetView, PoolRoute, ReplicaLoad, ReplicaRoute
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.loads import SUSPECT_S, LoadBoard
from controlplane.gateway.policy import PolicyChange
from controlplane.routing.candidates import Candidate
from dataplane.protocol import ReplicaState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> LoadBoard:
    return LoadBoard(5.0, clock=clock)


def route(state: ReplicaState = ReplicaState.READY, name: str = "r0", pool: str = "p") -> ReplicaRoute:
    return ReplicaRoute(replica=name, pool=pool, url="http://x", state=state, boot_epoch=1)


def report(running: int, waiting: int = 0, state: ReplicaState = ReplicaState.READY) -> ReplicaLoad:
    return ReplicaLoad(
        replica="r0", at=0.0, state=state, running=running, waiting=waiting, blocks_free=0, blocks_total=0
    )


def look(board: LoadBoard, state: ReplicaState = ReplicaState.READY) -> Candidate:
    return board.candidates([route(state)])[0]


def test_own_requests_are_counted_and_not_counted_twice_in_others(board: LoadBoard) -> None:
    for _ in range(3):
        board.begin("r0")
    board.heard(report(running=4, waiting=2))
    assert (look(board).in_flight, look(board).others) == (3, 3)
    board.begin("r0")
    board.end("r0")
    board.end("r0")
    assert (look(board).in_flight, look(board).others) == (2, 3)
    board.heard(report(running=1))
    assert look(board).others == 0


def test_f19_an_old_report_is_forgotten_and_own_counts_carry_on(board: LoadBoard, clock: Clock) -> None:
    board.begin("r0")
    board.heard(report(running=9))
    clock.now += 5.1
    assert (look(board).in_flight, look(board).others) == (1, 0)


@pytest.mark.parametrize(
    ("concluded", "reported", "expected"),
    [
        (ReplicaState.STALE, ReplicaState.READY, ReplicaState.READY),
        (ReplicaState.LOST, ReplicaState.READY, ReplicaState.READY),
        (ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.DRAINING),
        (ReplicaState.READY, ReplicaState.FAILED, ReplicaState.FAILED),
        (ReplicaState.DRAINING, ReplicaState.READY, ReplicaState.DRAINING),
        (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.STARTING),
    ],
)
def test_a_fresh_report_breaks_silence_and_bad_news_of_either_side_counts(
    board: LoadBoard, clock: Clock, concluded: ReplicaState, reported: ReplicaState, expected: ReplicaState
) -> None:
    board.heard(report(0, state=reported))
    assert look(board, concluded).state is expected
    clock.now += 6.0
    assert look(board, concluded).state is concluded


def test_a_suspect_is_cleared_by_its_report_or_by_time(board: LoadBoard, clock: Clock) -> None:
    board.suspect("r0")
    assert look(board).suspect
    clock.now += SUSPECT_S
    assert not look(board).suspect
    board.suspect("r0")
    board.heard(report(0))
    assert not look(board).suspect


def test_replicas_that_left_are_forgotten_once_nothing_runs_on_them(board: LoadBoard) -> None:
    board.begin("old")
    board.begin("r0")
    board.end("r0")
    board.retain(["new"])
    assert board.in_flight("old") == 1
    board.end("old")
    board.retain(["new"])
    assert board._loads == {}


def test_ending_more_than_began_is_a_defect(board: LoadBoard) -> None:
    board.begin("r0")
    board.end("r0")
    with pytest.raises(AssertionError):
        board.end("r0")


class Fleet:
    """Postgres as the directory sees it."""

    def __init__(self) -> None:
        self.view = FleetView(epoch=1, pools=[], replicas=[])
        self.reads = 0
        self.away = False

    async def load(self) -> FleetView:
        self.reads += 1
        if self.away:
            raise ConnectionRefusedError
        return self.view


def pool(name: str, model: str) -> PoolRoute:
    return PoolRoute(name=name, model=model, backend="native", created_at=1.0)


async def test_several_pools_of_one_model_share_its_requests() -> None:
    fleet = Fleet()
    routes = [route(name="a", pool="p1"), route(name="b", pool="p2"), route(name="c", pool="gone")]
    fleet.view = FleetView(epoch=1, pools=[pool("p2", "m"), pool("p1", "m"), pool("p3", "n")], replicas=routes)
    directory = FleetDirectory(fleet.load)
    await directory.refresh()
    assert [r.replica for r in directory.replicas("m")] == ["a", "b"]
    assert directory.replicas("n") == ()
    assert directory.replicas("unknown") == ()
    assert [(p.model, p.name) for p in directory.pools()] == [("m", "p1"), ("n", "p3")]
    assert directory.knows("c")
    assert not directory.knows("d")


async def test_an_announced_change_is_read_once_and_other_tables_are_not() -> None:
    fleet = Fleet()
    directory = FleetDirectory(fleet.load)
    directory.on_listening()
    running = asyncio.create_task(directory.run())
    await asyncio.sleep(0.05)
    reads = fleet.reads
    directory.on_change(PolicyChange(table="api_keys", id="k", epoch=2))
    await asyncio.sleep(0.05)
    assert fleet.reads == reads
    fleet.view = FleetView(epoch=2, pools=[pool("p", "m")], replicas=[])
    for _ in range(10):
        directory.on_change(PolicyChange(table="pools", id="p", epoch=2))
    async with asyncio.timeout(5):
        while directory.pool("m") is None:
            await asyncio.sleep(0.01)
    assert fleet.reads <= reads + 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_f19_without_announcements_the_fleet_is_read_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.gateway.fleet.REREAD_S", 0.02)
    fleet = Fleet()
    directory = FleetDirectory(fleet.load)
    running = asyncio.create_task(directory.run())
    fleet.away = True
    await asyncio.sleep(0.1)
    fleet.away = False
    fleet.view = FleetView(epoch=2, pools=[pool("p", "m")], replicas=[])
    async with asyncio.timeout(5):
        while directory.pool("m") is None:
            await asyncio.sleep(0.01)
    assert not directory.listening
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
