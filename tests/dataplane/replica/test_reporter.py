"""Reports: what the control plane holds equals what happened, whatever is lost on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from controlplane.telemetry import validation
from dataplane.ports import free_port
from dataplane.protocol import Command, ReplicaState, Report, ReportAck, UsageBasis, UsageRecord, encode
from dataplane.replica import Replica
from dataplane.reporter import HttpTransport, Reporter, ReportError
from tests.dataplane.replica.harness import TOKEN, make_config, scripted, serving, smollm2_tokenizer, until
from tests.dataplane.replica.test_usage import record

Answer = Callable[[Report], ReportAck | int]


def stored(report: Report) -> ReportAck:
    """What a control plane answers that took everything in."""
    return ReportAck(sequence=report.sequence, usage_ids=[item.attempt_id for item in report.usage], policy_epoch=5)


class ControlPlane:
    """Takes reports over HTTP by the protocol's rule; `answer` decides what it says, `keeps` whether it stores."""

    def __init__(self) -> None:
        self.answer: Answer = stored
        self.reports: list[Report] = []
        self.windows: dict[tuple[int, int], tuple[int, int]] = {}
        self.usage: dict[str, UsageRecord] = {}
        self.tokens: set[str] = set()

    async def take(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers["authorization"])
        report = msgspec.msgpack.decode(await request.read(), type=Report)
        self.reports.append(report)
        validation.check_report(report, report.sent_at)
        for window in report.windows:
            validation.check_window(window, report.sent_at)
        for item in report.usage:
            validation.check_usage(item, report.replica)
        answer = self.answer(report)
        if answer == 503:
            return web.Response(status=503)
        for window in report.windows:
            key = (report.boot_epoch, window.start)
            if key not in self.windows or self.windows[key][0] < report.sequence:
                self.windows[key] = (report.sequence, window.counters.service.received)
        self.usage |= {item.attempt_id: item for item in report.usage}
        if isinstance(answer, int):
            return web.Response(status=answer)
        return web.Response(body=encode(answer), content_type="application/msgpack")

    @property
    def received(self) -> int:
        return sum(value for _, value in self.windows.values())


@asynccontextmanager
async def control_plane(port: int = 0) -> AsyncIterator[tuple[ControlPlane, str]]:
    plane = ControlPlane()
    app = web.Application()
    app.router.add_post("/internal/v1/reports", plane.take)
    runner = web.AppRunner(app)
    await runner.setup()
    port = port or free_port("127.0.0.1", 0)
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield plane, f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def reporter_of(home: Path, url: str, clock: Clock) -> AsyncIterator[tuple[Reporter, Replica]]:
    """A reporter whose reports the test asks for one by one."""
    replica = Replica(make_config(home, scripted()), smollm2_tokenizer(), wall=clock)
    transport = HttpTransport(url, TOKEN)
    yield Reporter(replica, transport), replica
    await transport.close()
    await replica.journal.close()


async def test_a_report_says_who_what_and_since_when(tmp_path: Path) -> None:
    clock = Clock()
    async with control_plane() as (plane, url), reporter_of(tmp_path, url, clock) as (reporter, replica):
        replica.book.counters(clock()).service.received += 3
        assert await reporter.report()
        clock.now += 1
        replica.book.counters(clock()).service.received += 1
        assert await reporter.report()
        first, second = plane.reports
        assert plane.tokens == {f"Bearer {TOKEN}"}
        assert (first.replica, first.pool, first.url) == ("replica-7", "pool", replica.config.advertise_url)
        assert (first.sequence, first.acknowledged, first.full) == (1, 0, True)
        assert (second.sequence, second.acknowledged, second.full) == (2, 1, False)
        assert first.state is ReplicaState.STARTING
        assert first.boot_epoch == replica.boot_epoch
        assert (first.policy_epoch, second.policy_epoch) == (0, 5)
        assert plane.received == 4


async def test_nothing_is_counted_twice_when_acknowledgements_are_lost(tmp_path: Path) -> None:
    clock = Clock()
    outcomes: list[Answer] = [
        stored,
        lambda _: 500,
        lambda _: 503,
        lambda report: ReportAck(sequence=report.sequence - 1),
    ]
    async with control_plane() as (plane, url), reporter_of(tmp_path, url, clock) as (reporter, replica):
        for step in range(60):
            replica.book.counters(clock()).service.received += step
            plane.answer = outcomes[step % len(outcomes)]
            assert await reporter.report() is (step % 4 in (0, 3))
            clock.now += 3
        plane.answer = stored
        while replica.book.waiting:
            assert await reporter.report()
        assert plane.received == sum(range(60))
        sequences = [report.sequence for report in plane.reports]
        assert sequences == sorted(set(sequences))


async def test_usage_is_sent_until_it_is_acknowledged(tmp_path: Path) -> None:
    async with control_plane() as (plane, url), reporter_of(tmp_path, url, Clock()) as (reporter, replica):
        for number in range(3):
            replica.journal.add(record(str(number)))
        plane.answer = lambda _: 503
        assert not await reporter.report()
        assert len(replica.journal) == 3
        plane.answer = lambda report: ReportAck(sequence=report.sequence, usage_ids=["0", "2", "unknown"])
        assert await reporter.report()
        assert [item.attempt_id for item in replica.journal.batch(9)] == ["1"]
        plane.answer = stored
        assert await reporter.report()
        assert len(replica.journal) == 0
        assert set(plane.usage) == {"0", "1", "2"}
        assert plane.usage["0"].basis is UsageBasis.ENGINE


async def test_a_resync_sends_everything_again_and_marks_it(tmp_path: Path) -> None:
    clock = Clock()
    async with control_plane() as (plane, url), reporter_of(tmp_path, url, clock) as (reporter, replica):
        for _ in range(4):
            replica.book.counters(clock()).service.received += 1
            await reporter.report()
            clock.now += 10
        plane.windows.clear()
        resync = Command(id="resync-1", kind="resync")
        plane.answer = lambda report: ReportAck(sequence=report.sequence, commands=[resync])
        await reporter.report()
        await reporter.report()
        assert plane.reports[-1].full
        assert plane.received == 4
        await reporter.report()
        assert not plane.reports[-1].full, "a command repeated under the same id is obeyed once"


async def test_a_drain_command_drains_and_is_reported(tmp_path: Path) -> None:
    async with control_plane() as (plane, url):
        config = make_config(tmp_path, scripted(), control_url=url, report_interval_s=0.05)
        async with serving(config) as (replica, client):
            await until(lambda: any(r.state is ReplicaState.READY for r in plane.reports), "READY is reported")
            drain = Command(id="d", kind="drain")
            unknown = Command(id="x", kind="levitate")
            plane.answer = lambda report: ReportAck(sequence=report.sequence, commands=[unknown, drain])
            await until(lambda: plane.reports[-1].state is ReplicaState.DRAINING, "DRAINING is reported")
            assert replica.state is ReplicaState.DRAINING
            async with client.chat() as answer:
                assert answer.status == 503
            resume = Command(id="r", kind="resume")
            plane.answer = lambda report: ReportAck(sequence=report.sequence, commands=[resume])
            await until(lambda: plane.reports[-1].state is ReplicaState.READY, "READY is reported again")
            async with client.chat() as answer:
                assert answer.status == 200


async def test_a_dead_core_is_reported_at_once_not_at_the_next_interval(tmp_path: Path) -> None:
    async with control_plane() as (plane, url):
        config = make_config(tmp_path, scripted(), control_url=url, report_interval_s=3600.0)
        async with serving(config) as (replica, _):
            await until(lambda: any(r.state is ReplicaState.READY for r in plane.reports), "READY is reported")
            pid = replica.core.process_id
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: any(r.state is ReplicaState.FAILED for r in plane.reports), "the death is reported")
            failed = next(report for report in plane.reports if report.state is ReplicaState.FAILED)
            assert "SIGKILL" in failed.state_reason
            assert failed.ready is None
            await until(lambda: plane.reports[-1].core_restarts == 1, "the restart is reported")
            await until(lambda: plane.reports[-1].state is ReplicaState.READY, "READY again is reported")
            assert plane.reports[-1].core_epoch == 2


async def test_serving_goes_on_without_a_control_plane_and_it_gets_everything_later(tmp_path: Path) -> None:
    port = free_port("127.0.0.1", 0)
    config = make_config(tmp_path, scripted(), control_url=f"http://127.0.0.1:{port}", report_interval_s=0.05)
    async with serving(config) as (replica, client):
        for _ in range(3):
            async with client.chat() as answer:
                assert answer.status == 200
        await until(lambda: len(replica.journal) == 3, "usage is kept")
        async with control_plane(port) as (plane, _):
            await until(lambda: len(replica.journal) == 0, "usage arrives")
            await until(lambda: plane.received == 3, "windows arrive")
            assert len(plane.usage) == 3


async def test_the_last_report_of_a_stopping_replica_says_so(tmp_path: Path) -> None:
    async with control_plane() as (plane, url):
        config = make_config(tmp_path, scripted(), control_url=url, report_interval_s=3600.0)
        async with serving(config) as (_, client), client.chat() as answer:
            assert answer.status == 200
        last = plane.reports[-1]
        assert (last.state, last.state_reason) == (ReplicaState.DRAINING, "shutting down")
        assert plane.received == 1
        assert len(plane.usage) == 1


@pytest.mark.parametrize("reply", [b"\xc1", b"", b"x" * (2 << 20)], ids=["garbage", "empty", "huge"])
async def test_a_broken_acknowledgement_acknowledges_nothing(tmp_path: Path, reply: bytes) -> None:
    class Odd:
        async def post(self, body: bytes) -> bytes:
            if len(reply) > 1 << 20:
                raise ReportError("the control plane's answer is too large")
            return reply

    replica = Replica(make_config(tmp_path, scripted()), smollm2_tokenizer(), wall=Clock())
    reporter = Reporter(replica, Odd())
    replica.journal.add(record("a"))
    assert not await reporter.report()
    assert reporter.failures == 1
    assert len(replica.journal) == 1
    assert replica.book.waiting == 1


async def test_core_counters_are_differences_within_one_core_epoch(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, scripted(emit=4))) as (replica, client):
        for _ in range(2):
            async with client.chat() as answer:
                assert answer.status == 200
        assert replica.book.totals().scheduling.output_tokens == 8
        assert replica.gauges.blocks_total == 8
        pid = replica.core.process_id
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: replica.core.restarts == 1 and replica.state is ReplicaState.READY, "the core is back")
        assert replica.gauges.blocks_total == 0, "the dead core's blocks are gone with it"
        async with client.chat() as answer:
            assert answer.status == 200
        assert replica.book.totals().scheduling.output_tokens == 12
