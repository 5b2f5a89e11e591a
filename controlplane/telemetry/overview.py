"""The Overview: all figures of one window of time, for everything or one tenant or replica.

Layer: service. Two queries and one look into Redis, whatever is asked. It reads 10 s rows only, so a window is at
most an hour; longer spans are the rolled-up rows' business.
"""

from __future__ import annotations

from collections.abc import Mapping

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import InvalidRequestError
from controlplane.fleet import service as fleet
from controlplane.fleet.schemas import ReplicaView
from controlplane.telemetry import repository
from controlplane.telemetry.figures import Load, Tables, figures, mean_load
from controlplane.telemetry.schemas import Overview, ScopedFigures
from controlplane.telemetry.scopes import Scope
from dataplane.protocol import WINDOW_SECONDS, ReplicaState

SHORTEST_S = 60
LONGEST_S = 3600
MOST_ROWS = 500
"""Replicas and tenants listed at most; those with most requests come first."""

_SPEAKING = frozenset({ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING})


async def overview(
    session: AsyncSession,
    redis: Redis,
    *,
    now: float,
    window_s: int = 300,
    tenant: str | None = None,
    replica: str | None = None,
) -> Overview:
    """Figures of the last `window_s` seconds up to `now` (Unix), the still open 10 s span included.

    Rates are per second of the window that reports cover: it begins with the first span in which a gateway
    reported, and `Evidence.window_s` says how long it is. Gauges (KV use, running, waiting) are those of now, over
    the replicas that speak. A tenant has no engine-side figures. What gateways saw of the probe tenant's canaries is
    told in its own line only; engines cannot tell tenants apart. Raises InvalidRequestError.
    """
    if not SHORTEST_S <= window_s <= LONGEST_S or window_s % WINDOW_SECONDS:
        raise InvalidRequestError(
            f"window_s must be a multiple of {WINDOW_SECONDS} from {SHORTEST_S} to {LONGEST_S}", param="window_s"
        )
    tables = Tables(now, window_s)
    rows = await repository.recent(session, tables.first, tables.last, tenant=tenant, replica=replica)
    tables.add(rows, tenant=tenant, replica=replica)
    views = [view for view in await fleet.list_replicas(session, redis, now) if replica in (None, view.replica)]
    loads = {} if tenant is not None else _loads(views, tables)

    covered_s = tables.covered_s()
    heard = [row.recorded_at for row in rows] + [now - view.age_s for view in views if view.age_s is not None]
    return Overview(
        as_of=now,
        window_s=window_s,
        last_report_at=max(heard, default=None),
        total=figures(tables.total(), covered_s=covered_s, window_s=window_s, loads=list(loads.values())),
        by_replica=_by_replica(tables, views, loads, covered_s, window_s),
        by_tenant=[
            ScopedFigures(
                key=slug, label=slug, figures=figures(scope, covered_s=covered_s, window_s=window_s, loads=[])
            )
            for slug, scope in _busiest(tables.tenants)
        ],
        series=tables.series(),
    )


def _loads(views: list[ReplicaView], tables: Tables) -> dict[str, Load]:
    """The load of each replica that speaks: its live gauges, or its newest window's mean when Redis has none."""
    loads = {}
    for view in views:
        if view.state not in _SPEAKING:
            continue
        gauges = view.gauges
        if gauges is not None:
            loads[view.replica] = Load(
                running=gauges.running,
                waiting=gauges.waiting,
                blocks_used=gauges.blocks_used,
                blocks_total=gauges.blocks_total,
                slots=gauges.blocks_used * gauges.block_size,
                empty=gauges.kv_slots_empty,
            )
        elif view.replica in tables.latest:
            block_size = view.ready.block_size if view.ready else 0
            loads[view.replica] = mean_load(tables.latest[view.replica][1], block_size)
    return loads


def _by_replica(
    tables: Tables, views: list[ReplicaView], loads: Mapping[str, Load], covered_s: float | None, window_s: int
) -> list[ScopedFigures]:
    known = {view.replica: view for view in views}
    scopes = {replica: tables.replicas.get(replica, Scope()) for replica in [*known, *tables.replicas]}
    return [
        ScopedFigures(
            key=replica,
            label=replica,
            state=known[replica].state.value if replica in known else "",
            ready=known[replica].ready if replica in known else None,
            figures=figures(
                scope,
                covered_s=covered_s,
                window_s=window_s,
                loads=[loads[replica]] if replica in loads else [],
            ),
        )
        for replica, scope in _busiest(scopes)
    ]


def _busiest(scopes: Mapping[str, Scope]) -> list[tuple[str, Scope]]:
    """At most `MOST_ROWS` scopes in key order; beyond that those with most requests are kept."""
    kept = sorted(scopes.items(), key=lambda item: (-item[1].accepted, item[0]))[:MOST_ROWS]
    return sorted(kept, key=lambda item: item[0])
