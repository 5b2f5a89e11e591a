"""The ZMQ link: every message arrives as it was sent, a stranger's epoch is dropped, nothing waits for ever."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.core_link import (
    LONGEST_SOCKET_PATH,
    TO_CORE_HIGH_WATER,
    CoreBusyError,
    CoreEndpoint,
    CoreUnreachableError,
    FrontEndpoint,
    UnreadableFrameError,
    identity_of,
)
from dataplane.protocol import (
    AbortRequests,
    AddRequest,
    CoreFault,
    CoreMessage,
    CoreReady,
    CoreStats,
    Counters,
    EngineRequest,
    FinishReason,
    FrontMessage,
    Gauges,
    Histogram,
    RequestOutput,
    SamplingParams,
    Shutdown,
    StepOutput,
    Timing,
)

EPOCH = 4


@pytest.fixture
async def front() -> Iterator[FrontEndpoint]:
    endpoint = FrontEndpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def core(front: FrontEndpoint) -> Iterator[CoreEndpoint]:
    with CoreEndpoint(front.address, EPOCH) as endpoint:
        yield endpoint


async def greet(front: FrontEndpoint, core: CoreEndpoint) -> None:
    """A ROUTER knows a peer by its first message."""
    core.send(CoreFault(boot_epoch=EPOCH, error="hello"))
    assert await front.receive() == (identity_of(EPOCH), CoreFault(boot_epoch=EPOCH, error="hello"))


def request(name: str = "r", tokens: int = 3) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        params=SamplingParams(max_tokens=5, stop=("a", "é"), stop_token_ids=(1, 2), seed=-(2**63)),
        arrived_at=1.5,
        tenant="demo",
        priority=-3,
        fair_tag=1e300,
        cache_salt="salt",
    )


def full_stats() -> CoreStats:
    counters = Counters()
    counters.scheduling.preemptions = {"out_of_blocks": 2}
    counters.runtime.step_time = Histogram()
    counters.runtime.step_time.record(0.25, 3)
    return CoreStats(counters=counters, gauges=Gauges(running=1, blocks_total=8))


FRONT_MESSAGES: list[FrontMessage] = [
    AddRequest(request=request(), boot_epoch=EPOCH),
    AbortRequests(request_ids=["a", "b"], boot_epoch=EPOCH),
    Shutdown(drain=False, boot_epoch=EPOCH),
]
CORE_MESSAGES: list[CoreMessage] = [
    CoreReady(boot_epoch=EPOCH, model="m", max_model_len=2048, block_size=16, total_blocks=9, eos_token_ids=[2]),
    StepOutput(
        boot_epoch=EPOCH,
        step=3,
        outputs=[
            RequestOutput(
                request_id="r",
                token_ids=[1, 2],
                finish=FinishReason.STOP,
                stop_reason=2,
                cached_tokens=16,
                timing=Timing(queued=1.0, scheduled=2.0, first_token=3.0, last_token=4.0),
            )
        ],
        stats=full_stats(),
    ),
    CoreFault(boot_epoch=EPOCH, error="é"),
]


async def test_every_front_message_arrives_in_order_and_whole(front: FrontEndpoint, core: CoreEndpoint) -> None:
    await greet(front, core)
    for message in FRONT_MESSAGES:
        front.send(EPOCH, message)
    seen: list[FrontMessage] = []
    while len(seen) < len(FRONT_MESSAGES):
        core.wait()
        seen += core.drain()
    assert seen == FRONT_MESSAGES


async def test_every_core_message_arrives_in_order_and_whole(front: FrontEndpoint, core: CoreEndpoint) -> None:
    for message in CORE_MESSAGES:
        core.send(message)
    assert [(await front.receive())[1] for _ in CORE_MESSAGES] == CORE_MESSAGES


async def test_a_message_of_another_epoch_is_dropped_by_the_core(front: FrontEndpoint, core: CoreEndpoint) -> None:
    await greet(front, core)
    front.send(EPOCH, AbortRequests(request_ids=["old"], boot_epoch=EPOCH - 1))
    front.send(EPOCH, AbortRequests(request_ids=["new"], boot_epoch=EPOCH))
    seen: list[FrontMessage] = []
    while not seen:
        core.wait()
        seen += core.drain()
    assert seen == [AbortRequests(request_ids=["new"], boot_epoch=EPOCH)]
    assert core.dropped == 1


async def test_a_core_that_is_not_there_is_an_error_not_a_wait(front: FrontEndpoint, core: CoreEndpoint) -> None:
    await greet(front, core)
    with pytest.raises(CoreUnreachableError):
        front.send(EPOCH + 1, Shutdown(boot_epoch=EPOCH + 1))


async def test_a_core_that_takes_nothing_fills_up_and_is_then_refused(front: FrontEndpoint, core: CoreEndpoint) -> None:
    await greet(front, core)
    heavy = AddRequest(request=request(tokens=2000), boot_epoch=EPOCH)
    sent = 0
    with pytest.raises(CoreBusyError):
        while sent < 10 * TO_CORE_HIGH_WATER:
            front.send(EPOCH, heavy)
            sent += 1
    assert sent >= TO_CORE_HIGH_WATER
    seen = 0
    while seen < sent:
        core.wait()
        seen += len(core.drain())
    assert seen == sent, "what was accepted is delivered"


async def test_a_wait_ends_when_another_thread_wakes_it_and_only_then(core: CoreEndpoint) -> None:
    sleeping = asyncio.create_task(asyncio.to_thread(core.wait))
    await asyncio.sleep(0.05)
    assert not sleeping.done()
    core.wake()
    await asyncio.wait_for(sleeping, 30)
    # One that comes before the wait is not lost, and however many there were, they are one.
    for _ in range(3000):
        core.wake()
    await asyncio.wait_for(asyncio.to_thread(core.wait), 30)
    started = time.monotonic()
    core.wait(0.05)
    assert time.monotonic() - started >= 0.05


async def test_a_frame_that_is_no_message_names_its_sender(front: FrontEndpoint, core: CoreEndpoint) -> None:
    core.send(Shutdown(boot_epoch=EPOCH))  # type: ignore[arg-type]
    core.send(CoreFault(boot_epoch=EPOCH, error="after it"))
    with pytest.raises(UnreadableFrameError) as caught:
        await front.receive()
    assert caught.value.identity == identity_of(EPOCH)
    assert await front.receive() == (identity_of(EPOCH), CoreFault(boot_epoch=EPOCH, error="after it"))


async def test_a_closed_link_may_be_woken(front: FrontEndpoint) -> None:
    with CoreEndpoint(front.address, EPOCH) as endpoint:
        pass
    endpoint.wake()


async def test_the_socket_lies_in_a_private_folder_that_is_removed() -> None:
    endpoint = FrontEndpoint()
    folder = Path(endpoint.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    endpoint.close()
    assert not folder.exists()


async def test_a_given_folder_is_cleared_of_a_killed_fronts_socket_and_a_long_one_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "ipc"
    if len(bytes(folder)) > LONGEST_SOCKET_PATH:
        pytest.skip("the temporary folder's own path is too long for a unix socket")
    folder.mkdir()
    (folder / "core").write_text("left behind")
    endpoint = FrontEndpoint(folder)
    assert endpoint.address == f"ipc://{folder}/core"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    endpoint.close()
    long = FrontEndpoint(tmp_path / ("x" * LONGEST_SOCKET_PATH))
    assert len(long.address) < 107
    long.close()
