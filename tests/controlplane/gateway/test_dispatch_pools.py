"""Several pools of one model, and models that come and go: one line for all of it."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from controlplane.admission.shares import SharePlan, TenantShare
from controlplane.errors import CapacityError
from controlplane.fleet.schemas import FleetView, PoolRoute, ReplicaRoute
from controlplane.gateway.body import read_inference_body
from controlplane.gateway.wishes import read_wish
from controlplane.settings import Settings
from tests.controlplane.gateway.harness import CHAT, Running, fleet, route, running_gateway
from tests.controlplane.gateway.replicas import fake_replica
from tests.controlplane.gateway.test_dispatch import Doors, ask, doors, drained, in_line, roomy, small, until, waiting

__all__ = ["roomy", "small"]


def joined(*routes: ReplicaRoute) -> FleetView:
    """The fleet after a pool that comes first by name has joined the model's."""
    pools = [PoolRoute(name=name, model="m", backend="native", created_at=1.0) for name in ("pool-a", "pool-m")]
    return FleetView(epoch=2, pools=pools, replicas=list(routes))


def learns(served: Running, view: FleetView) -> None:
    served.gateway.fleet.adopt(view)
    served.gateway.dispatch.fleet_changed()


async def test_f13_gateways_share_one_line_whichever_of_the_models_pools_they_met_first(small: Settings) -> None:
    room = Doors()
    async with fake_replica(room.behave) as replica:
        only = route(replica, "r0")
        async with running_gateway(small, only) as before, running_gateway(small, models=()) as after:
            for served in (before, after):
                learns(served, joined(only))
            first = asyncio.create_task(ask(before, "first"))
            await until(lambda: room.names == ["first"])
            second = asyncio.create_task(ask(after, "second"))
            await until(lambda: waiting(after) == 1 or len(room.names) == 2)
            await asyncio.sleep(0.1)
            assert room.names == ["first"], "the replica's one slot is taken, whichever gateway took it"
            room.open(0)
            await until(lambda: room.names == ["first", "second"])
            room.open(1)
            assert {(await task)[0] for task in (first, second)} == {200}


async def test_plans_of_the_pool_that_comes_first_count_also_after_another_was_it(small: Settings) -> None:
    share = TenantShare(tenant="acme", share=1, weight=7.0)
    plan = SharePlan(pool="pool-a", epoch=4, planned_at=time.time(), capacity=1, shares=(share,), cost=None)
    async with doors(small) as (served, room, replica):
        dispatch = served.gateway.dispatch
        dispatch.adopt_plans([plan])
        assert served.metric("dispatch_plan_epoch", model="m") == 0
        learns(served, joined(route(replica, "r0")))
        assert served.metric("dispatch_plan_epoch", model="m") == 4
        tasks = await in_line(served, room, [("waits", {})])
        assert dispatch.line("m")._weights["acme"] == 7.0
        await drained(room, tasks)


async def test_a_model_that_leaves_while_its_lease_is_taken_is_no_fault_of_the_gateway(small: Settings) -> None:
    async with doors(small) as (served, _, _):
        grant = next(iter(served.policy.grants.values()))
        body = read_inference_body(json.dumps({**CHAT, "model": "other"}).encode())
        with pytest.raises(CapacityError) as refused:
            await served.gateway.dispatch.admit(grant, read_wish({}, 0), body)
        assert refused.value.code == "no_capacity"


async def test_the_line_of_a_model_that_nobody_serves_any_more_ends_once_nobody_is_in_it(small: Settings) -> None:
    def works() -> set[str]:
        names = {task.get_name() for task in asyncio.all_tasks()}
        return names & {"gateway turns of m", "gateway pokes of m"}

    async with doors(small) as (served, room, replica):
        dispatch, gone = served.gateway.dispatch, FleetView(epoch=2, pools=[], replicas=[])
        tasks = await in_line(served, room, [])
        learns(served, gone)
        assert len(dispatch.states()) == 1, "somebody runs"
        await drained(room, tasks)
        assert len(works()) == 2
        learns(served, gone)
        assert dispatch.states() == []
        await until(lambda: not works())
        learns(served, fleet(route(replica, "r0")))
        tasks = [asyncio.create_task(ask(served, "again"))]
        await until(lambda: room.names == ["first", "again"])
        room.open(1)
        assert (await tasks[0])[0] == 200
