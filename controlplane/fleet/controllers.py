"""Admin API of pools and replicas. Layer: service. Parses and answers; the service decides."""

from __future__ import annotations

import time

import msgspec
from litestar import Controller, Router, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.component import Resources
from controlplane.fleet import service
from controlplane.fleet.schemas import PoolPatch, PoolRoute, ReplicaView
from dataplane.protocol import ReplicaState


class DrainAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the replica is wanted drained, and its state now."""

    replica: str
    drain_wanted: bool
    state: ReplicaState


class FleetController(Controller):
    """Pools, and the replicas that report to this control plane."""

    tags = ["fleet"]  # noqa: RUF012 - the framework's own attribute

    @get("/pools", operation_id="listPools", summary="List pools, by name")
    async def list_pools(self, session: NamedDependency[AsyncSession]) -> list[PoolRoute]:
        return await service.list_pools(session)

    @patch("/pools/{pool:str}", operation_id="changePool", summary="Say what each replica of a pool holds at once")
    async def change_pool(
        self, session: NamedDependency[AsyncSession], pool: FromPath[str], data: JSONBody[PoolPatch]
    ) -> PoolRoute:
        return await service.set_pool_size(session, pool, data)

    @get("/replicas", operation_id="listReplicas", summary="List replicas with their state and load")
    async def list_replicas(
        self, session: NamedDependency[AsyncSession], resources: NamedDependency[Resources]
    ) -> list[ReplicaView]:
        return await service.list_replicas(session, resources.redis, time.time())

    @post(
        "/replicas/{replica:str}/drain",
        operation_id="drainReplica",
        summary="Send a replica no more requests; those it has run to their end",
        status_code=200,
    )
    async def drain(
        self,
        session: NamedDependency[AsyncSession],
        current_user: NamedDependency[Principal],
        replica: FromPath[str],
    ) -> DrainAnswer:
        reason = f"{current_user.name} asked to drain it"
        state = await service.set_drain(session, replica, True, reason=reason)
        return DrainAnswer(replica=replica, drain_wanted=True, state=state)

    @delete(
        "/replicas/{replica:str}/drain",
        operation_id="undrainReplica",
        summary="Stop wanting a replica drained; it serves again when it hears of it, within about a second",
        status_code=200,
    )
    async def undrain(
        self,
        session: NamedDependency[AsyncSession],
        current_user: NamedDependency[Principal],
        replica: FromPath[str],
    ) -> DrainAnswer:
        reason = f"{current_user.name} no longer asks to drain it"
        state = await service.set_drain(session, replica, False, reason=reason)
        return DrainAnswer(replica=replica, drain_wanted=False, state=state)


router = Router("/api/v1", route_handlers=[FleetController], request_max_body_size=64 * 1024)
