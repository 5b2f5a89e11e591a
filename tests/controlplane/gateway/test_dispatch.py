"""Fair dispatch through the gateway: turns by credits, weights, bands and deadlines, and who is refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs
from redis.asyncio import Redis

from controlplane.admission.shares import SharePlan, TenantShare
from controlplane.fleet.schemas import FleetView
from controlplane.gateway import line as lines
from controlplane.settings import Secret, Settings
from controlplane.slo.schemas import Slo
from dataplane.protocol import ReplicaState
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.harness import (
    CHAT,
    STREAM,
    Running,
    assert_nothing_left,
    check_error,
    fleet,
    route,
    running_gateway,
)
from tests.controlplane.gateway.replicas import DONE, FakeReplica, chunk, event, fake_replica, usage_chunk

OTHER = {"tenant_id": "tenant-id-umbra", "tenant": "umbra", "cache_salt": "salt-umbra"}


class Doors:
    """A replica that answers each request when it is let, in the order in which they came."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, asyncio.Event]] = []

    async def behave(self, request: web.Request, body: bytes) -> web.StreamResponse:
        door = asyncio.Event()
        self.waiting.append((json.loads(body)["messages"][0]["content"], door))
        await door.wait()
        if not json.loads(body).get("stream"):
            return web.json_response(replicas.COMPLETION)
        response = await replicas.start_stream(request)
        for piece in (event(chunk("a")), event(usage_chunk()), DONE):
            await response.write(piece)
        return response

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.waiting]

    def open(self, place: int) -> None:
        self.waiting[place][1].set()


@pytest.fixture
def roomy(offline_settings: Settings, valkey: str, redis: Redis) -> Settings:
    """A Redis of its own and no Postgres."""
    return structs.replace(offline_settings, redis_url=Secret(valkey))


@pytest.fixture
def small(roomy: Settings) -> Settings:
    """One slot, short lines."""
    return structs.replace(
        roomy,
        assumed_slots=1,
        queue_short=4,
        queue_tenant=3,
        long_prompt=1_000,
        lease_deadline_ms=10_000,
        queue_wait_s=20.0,
    )


@asynccontextmanager
async def doors(settings: Settings) -> AsyncIterator[tuple[Running, Doors, FakeReplica]]:
    room = Doors()
    async with (
        fake_replica(room.behave) as replica,
        running_gateway(settings, route(replica, "r0")) as served,
    ):
        yield served, room, replica


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def say(name: str) -> dict[str, object]:
    return {**CHAT, "messages": [{"role": "user", "content": name}], "max_tokens": 5}


async def ask(served: Running, name: str, **options: object) -> tuple[int, dict[str, str], dict[str, object]]:
    async with served.post(say(name), **options) as response:  # type: ignore[arg-type]
        return response.status, {k.lower(): v for k, v in response.headers.items()}, await response.json()


async def read(served: Running) -> bytes:
    async with served.post({**STREAM, "max_tokens": 50}) as response:
        return await response.read()


def waiting(served: Running) -> int:
    return sum(sum(state.waiting.values()) for state in served.gateway.dispatch.states())


async def in_line(served: Running, room: Doors, asked: list[tuple[str, dict[str, object]]]) -> list[asyncio.Task]:
    """One that runs, then each of `asked` in line behind it."""
    tasks = [asyncio.create_task(ask(served, "first"))]
    await until(lambda: room.names == ["first"])
    for place, (name, options) in enumerate(asked, 1):
        tasks.append(asyncio.create_task(ask(served, name, **options)))
        await until(lambda place=place: waiting(served) == place)
    return tasks


async def drained(room: Doors, tasks: list[asyncio.Task]) -> list[str]:
    """Let one after another through; in which order they came."""
    for place in range(len(tasks)):
        await until(lambda place=place: len(room.waiting) > place)
        room.open(place)
    await asyncio.gather(*tasks)
    return room.names


async def test_while_there_is_room_and_nobody_waits_no_call_stands_before_a_request(roomy: Settings) -> None:
    async with fake_replica() as replica, running_gateway(roomy, route(replica, "r0")) as served:
        await ask(served, "warm")
        queue = served.gateway.dispatch.line("m").queue
        before = queue.turns
        for number in range(30):
            assert (await ask(served, str(number)))[0] == 200
        assert served.metric("dispatch_admitted_total", band="standard", how="at_once") >= 30
        assert queue.turns - before < 30, "what was served is told afterwards, many at a time"
        await until(lambda: queue.last is not None and queue.last.slots == 0 and not queue.unsent)
        await assert_nothing_left(served)


async def test_tenants_take_turns_and_a_band_goes_before_the_next(small: Settings) -> None:
    async with doors(small) as (served, room, _):
        umbra, low = served.policy.key(**OTHER), served.policy.key(priority=10)
        for _ in range(64):  # so that sizes are estimated as the replica will count them
            for tenant in ("acme", "umbra"):
                served.gateway.dispatch.line("m").pace.counted(tenant, 170, 12, 8, 3)
        tasks = await in_line(
            served,
            room,
            [("low", {"key": low}), ("acme 1", {}), ("acme 2", {}), ("umbra", {"key": umbra})],
        )
        order = await drained(room, tasks)
        assert order[0] == "first"
        assert order[-1] == "low"
        assert order.index("umbra") < order.index("acme 2"), "the other tenant is served less so far"
        await assert_nothing_left(served)


async def test_of_a_tenants_requests_the_earliest_deadline_goes_first(small: Settings) -> None:
    async with doors(small) as (served, room, _):
        tasks = await in_line(
            served,
            room,
            [
                ("late", {"headers": {"x-deadline-ms": "500000"}}),
                ("never", {}),
                ("soon", {"headers": {"x-deadline-ms": "90000"}}),
            ],
        )
        assert await drained(room, tasks) == ["first", "soon", "late", "never"]


async def test_a_client_puts_itself_back_but_never_forward(small: Settings) -> None:
    async with doors(small) as (served, room, replica):
        tasks = await in_line(
            served,
            room,
            [("back", {"headers": {"x-priority": "60"}}), ("forward", {"headers": {"x-priority": "-100"}})],
        )
        assert await drained(room, tasks) == ["first", "forward", "back"]
        assert [each.headers["x-tidegate-priority"] for each in replica.seen] == ["0", "0", "60"]
        tags = [float(each.headers["x-tidegate-fair-tag"]) for each in replica.seen]
        assert tags[1] >= tags[0]
        assert tags[1] > 0, "the engine learns how much the tenant was served"
        assert not any(name.startswith("x-priority") for each in replica.seen for name in each.headers)


@pytest.mark.parametrize(
    ("header", "value"),
    [("x-priority", "high"), ("x-priority", "101"), ("x-deadline-ms", "0"), ("x-service-class", "Ä")],
)
async def test_a_wish_that_cannot_be_read_is_refused_by_name(small: Settings, header: str, value: str) -> None:
    async with doors(small) as (served, _, replica):
        status, _, body = await ask(served, "x", headers={header: value})
        assert (status, check_error(body, "invalid_header")["param"]) == (400, header)
        assert not replica.seen


async def test_f12_a_client_that_leaves_the_line_frees_its_place(small: Settings) -> None:
    async with doors(small) as (served, room, _):
        tasks = await in_line(served, room, [("leaves", {}), ("stays", {})])
        tasks[1].cancel()
        await until(lambda: waiting(served) == 1)
        del tasks[1]
        assert await drained(room, tasks) == ["first", "stays"]
        await assert_nothing_left(served)


async def test_f24_a_full_line_sheds_the_lowest_band_then_the_newest(small: Settings) -> None:
    async with doors(structs.replace(small, queue_tenant=100)) as (served, room, _):
        batch, urgent = served.policy.key(priority=90), served.policy.key(priority=-1)
        tasks = await in_line(
            served,
            room,
            [("batch old", {"key": batch}), ("batch new", {"key": batch}), ("standard 1", {}), ("standard 2", {})],
        )
        urgent_one = asyncio.create_task(ask(served, "urgent", key=urgent))
        status, headers, body = await tasks[2]
        assert (status, check_error(body, "shed")["code"]) == (503, "shed")
        assert int(headers["retry-after"]) >= 1
        assert headers["x-tidegate-reason"] == "shed; layer=scheduling; retry-after=estimate"
        status, headers, body = await ask(served, "one more", key=batch)
        assert (status, check_error(body, "queue_full")["code"]) == (503, "queue_full"), "the newest of the lowest band"
        left = [tasks[0], tasks[1], *tasks[3:], urgent_one]
        order = await drained(room, left)
        assert order[:2] == ["first", "urgent"]
        assert order[-1] == "batch old"
        assert served.metric("dispatch_refused_total", band="batch", code="shed") == 1
        await assert_nothing_left(served)


async def test_f24_each_tenant_keeps_its_weighted_part_of_a_full_line(small: Settings) -> None:
    async with doors(structs.replace(small, queue_tenant=100)) as (served, room, _):
        umbra = served.policy.key(priority=90, **OTHER)
        tasks = await in_line(
            served, room, [("umbra 1", {"key": umbra}), ("umbra 2", {"key": umbra}), ("acme 1", {}), ("acme 2", {})]
        )
        status, _, body = await ask(served, "acme 3")
        assert (status, check_error(body, "queue_full")["code"]) == (503, "queue_full"), "though its band is the higher"
        assert sorted(await drained(room, tasks)) == ["acme 1", "acme 2", "first", "umbra 1", "umbra 2"]


async def test_a_tenants_own_line_is_bounded_too(small: Settings) -> None:
    async with doors(small) as (served, room, _):
        tasks = await in_line(served, room, [("1", {}), ("2", {}), ("3", {})])
        status, _, body = await ask(served, "too many")
        assert (status, check_error(body, "tenant_queue_full")["code"]) == (503, "tenant_queue_full")
        tasks.append(asyncio.create_task(ask(served, "another tenant", key=served.policy.key(**OTHER))))
        await until(lambda: waiting(served) == 4)
        await drained(room, tasks)


async def test_f24_a_full_line_refuses_before_quotas_are_looked_at(
    small: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal costs no call, and those refused are told to come back one after another."""
    async with doors(small) as (served, room, _):
        tasks = await in_line(served, room, [("1", {}), ("2", {}), ("3", {})])
        taken: list[object] = []
        take = served.gateway.meter.take

        async def watched(*args: Any, **named: Any) -> object:
            taken.append(args)
            return await take(*args, **named)

        monkeypatch.setattr(served.gateway.meter, "take", watched)
        waits = []
        for number in range(8):
            status, headers, body = await ask(served, f"too many {number}")
            assert (status, check_error(body, "tenant_queue_full")["code"]) == (503, "tenant_queue_full")
            assert headers["x-tidegate-reason"] == "tenant_queue_full; layer=scheduling; retry-after=estimate"
            waits.append(int(headers["retry-after"]))
        assert not taken
        assert len(set(waits)) >= 3, "not all at once"
        umbra = asyncio.create_task(ask(served, "another tenant", key=served.policy.key(**OTHER)))
        tasks.append(umbra)
        await until(lambda: waiting(served) == 4)
        assert (await ask(served, "one more"))[0] == 503
        await drained(room, tasks)
        await assert_nothing_left(served)


async def test_a_request_that_would_miss_its_deadline_is_refused_at_once_with_the_prediction(small: Settings) -> None:
    async with doors(small) as (served, room, replica):
        line = served.gateway.dispatch.line("m")
        for _ in range(10):
            line.pace.first_token(100, 0.2)
            line.pace.held(5.0)
        tasks = await in_line(served, room, [("in line", {})])
        seen = len(replica.seen)
        status, headers, body = await ask(served, "hurry", headers={"x-deadline-ms": "900"})
        assert status == 503
        check_error(body, "deadline_unreachable")
        assert "predicted-ttft=" in headers["x-tidegate-reason"]
        assert 1 <= int(headers["retry-after"]) <= 300
        status, headers, body = await ask(served, "hopeless", headers={"x-deadline-ms": "1"})
        check_error(body, "deadline_impossible")
        assert (status, headers["x-should-retry"]) == (503, "false")
        assert "retry-after" not in headers
        assert len(replica.seen) == seen
        await drained(room, tasks)


async def test_one_slow_spell_does_not_refuse_every_deadline_for_good(
    small: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is refused shows no speed: what was seen long ago must not refuse everybody after."""
    monkeypatch.setattr(lines, "TRUST_S", 1.0)
    async with doors(small) as (served, room, _):
        tasks = await in_line(served, room, [("in line", {})])
        line = served.gateway.dispatch.line("m")
        for _ in range(10):
            line.first_token(100, 60.0)
        hurried: dict[str, object] = {"headers": {"x-deadline-ms": "5000"}}
        _, _, body = await ask(served, "refused", **hurried)
        check_error(body, "deadline_impossible")
        await drained(room, tasks)
        line._seen_at -= 2.0  # as if so long had passed
        tried = asyncio.create_task(ask(served, "tried", **hurried))
        await until(lambda: room.names == ["first", "in line", "tried"])
        room.open(2)
        assert (await tried)[0] == 200


async def test_an_objective_refuses_what_would_miss_it_where_others_wait(small: Settings) -> None:
    async with doors(small) as (served, room, _):
        promise = Slo(
            slo_id="s", tenant_id=None, pool="pool-m", service_class="interactive", ttft_ms=900, ttft_share=0.9,
            tpot_ms=None, tpot_share=None, availability=None, window_days=30,
        )  # fmt: skip
        served.gateway.dispatch.adopt_slos((promise,))
        line = served.gateway.dispatch.line("m")
        for _ in range(10):
            line.pace.first_token(100, 0.2)
            line.pace.held(5.0)
        tasks = await in_line(served, room, [("in line", {})])
        status, _, body = await ask(served, "promised", headers={"x-service-class": "interactive"})
        assert status == 503
        check_error(body, "deadline_unreachable")
        tasks.append(asyncio.create_task(ask(served, "nothing promised")))
        await until(lambda: waiting(served) == 2)
        await drained(room, tasks)


async def test_draining_refuses_those_who_wait(small: Settings) -> None:
    async with doors(small) as (served, room, _):
        tasks = await in_line(served, room, [("waits", {})])
        drain = asyncio.create_task(served.gateway.drain(5.0))
        status, headers, body = await tasks[1]
        assert status == 503
        check_error(body, "gateway_shutdown")
        assert headers["retry-after"] == "6", "when all that runs has ended or was cut"
        status, headers, body = await ask(served, "late")
        check_error(body, "gateway_shutdown")
        assert 1 <= int(headers["retry-after"]) <= 6
        room.open(0)
        assert (await tasks[0])[0] == 200
        await drain


async def test_nobody_waits_for_longer_than_allowed(small: Settings) -> None:
    async with doors(structs.replace(small, queue_wait_s=0.1)) as (served, room, _):
        tasks = await in_line(served, room, [("waits", {})])
        status, headers, body = await tasks[1]
        assert status == 503
        check_error(body, "queue_wait_exceeded")
        assert 1 <= int(headers["retry-after"]) <= 60
        room.open(0)
        await tasks[0]


async def test_f14_without_redis_a_gateway_dispatches_on_its_own_and_says_so(offline_settings: Settings) -> None:
    async with doors(structs.replace(offline_settings, assumed_slots=1)) as (served, room, _):
        tasks = await in_line(served, room, [("waits", {})])
        assert served.metric("dispatch_alone", model="m") == 1
        assert room.names == ["first"]
        assert await drained(room, tasks) == ["first", "waits"]


async def test_f19_stale_replicas_keep_their_credits(small: Settings) -> None:
    async with doors(small) as (served, room, replica):
        tasks = [asyncio.create_task(ask(served, "first"))]
        await until(lambda: room.names == ["first"])
        served.policy.view = fleet(route(replica, "r0", ReplicaState.STALE))
        served.gateway.fleet.adopt(served.policy.view)
        served.gateway.dispatch.fleet_changed()
        assert served.gateway.dispatch.states()[0].slots == 1
        tasks.append(asyncio.create_task(ask(served, "second")))
        await until(lambda: waiting(served) == 1)
        await drained(room, tasks)


async def test_what_a_replica_holds_is_the_pools_setting_then_its_own_word(small: Settings) -> None:
    async with doors(small) as (served, _, replica):
        told = structs.replace(route(replica, "r0"), slots=7, tokens=900, context=300)
        view = FleetView(epoch=2, pools=fleet().pools, replicas=[told])
        dispatch = served.gateway.dispatch

        def slots(view: FleetView) -> int:
            served.gateway.fleet.adopt(view)
            dispatch.fleet_changed()
            return dispatch.states()[0].slots

        assert slots(view) == 7
        pools = [structs.replace(pool, replica_slots=3) for pool in view.pools]
        assert slots(structs.replace(view, pools=pools)) == 3


async def test_long_prompts_have_a_lane_and_replicas_of_their_own(small: Settings) -> None:
    async with (
        fake_replica(replicas.hang) as one,
        fake_replica() as other,
        running_gateway(structs.replace(small, assumed_slots=4), route(one, "r0"), route(other, "r1")) as served,
    ):
        long = asyncio.create_task(ask(served, "x" * 8_000))
        await until(lambda: len(one.seen) == 1)
        await until(lambda: served.gateway.dispatch.line("m").long_runs)
        second = asyncio.create_task(ask(served, "y" * 8_000))
        await until(lambda: waiting(served) == 1)
        for number in range(6):
            assert (await ask(served, str(number)))[0] == 200
        assert len(other.seen) == 6, "short prompts keep away from the replica that computes a long one"
        assert len(one.seen) == 1
        for task in (long, second):
            task.cancel()
        await asyncio.gather(long, second, return_exceptions=True)
        await assert_nothing_left(served)


async def test_what_streams_produce_is_charged_and_the_engines_count_puts_it_right(small: Settings) -> None:
    async with doors(small) as (served, room, _):
        queue = served.gateway.dispatch.line("m").queue
        asked = asyncio.create_task(read(served))
        await until(lambda: len(room.waiting) == 1)
        room.open(0)
        await asked
        await until(lambda: queue.last is not None and queue.last.slots == 0 and not queue.unsent)
        redis = served.gateway.dispatch._redis
        stored = await redis.hgetall("tidegate:turn:{m}:served")
        # 12 prompt tokens of which 8 were cached, 3 of output, at 1, 0.25 and 2
        assert [float(value) for value in stored.values()] == [4 + 8 * 0.25 + 3 * 2]


async def test_f38_a_plan_replaces_none_of_a_later_epoch_and_counts_while_it_is_fresh(small: Settings) -> None:
    def plan(epoch: int, weight: float, planned_at: float) -> SharePlan:
        share = TenantShare(tenant="acme", share=1, weight=weight)
        return SharePlan(pool="pool-m", epoch=epoch, planned_at=planned_at, capacity=1, shares=(share,))

    async with doors(small) as (served, _, _):
        dispatch = served.gateway.dispatch
        grant = next(iter(served.policy.grants.values()))
        assert dispatch._weight("pool-m", grant) == 1.0
        dispatch.adopt_plans([plan(2, 5.0, time.time())])
        dispatch.adopt_plans([plan(1, 9.0, time.time())])
        assert dispatch._weight("pool-m", grant) == 5.0
        assert served.metric("dispatch_plan_epoch", model="m") == 2
        dispatch.adopt_plans([plan(3, 9.0, time.time() - 3_600)])
        assert dispatch._weight("pool-m", grant) == 1.0, "nobody plans any more"
