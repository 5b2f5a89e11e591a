"""Pools and replicas: what gateways route by, what pages show, what a report changes.

Layer: service. Decides; the caller's transaction commits. It never routes a request and never starts or stops
a process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, structs
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admission.dispatch import credit_of
from controlplane.errors import InvalidRequestError, NotFoundError
from controlplane.fleet import repository
from controlplane.fleet.live import LiveGauges, LiveLoad, read_gauges
from controlplane.fleet.liveness import Limits, effective, judge, seconds_to_change, silence
from controlplane.fleet.registration import EventKind, ReplicaEventDraft, ReplicaFacts, apply, commands, is_newer
from controlplane.fleet.repository import ReplicaTimes
from controlplane.fleet.schemas import FleetView, PoolPatch, PoolRoute, ReplicaRoute, ReplicaView
from controlplane.tenants import service as tenants
from dataplane.protocol import Command, CoreReady, Gauges, ReplicaState, Report

POOL_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
BACKENDS = ("native",)


async def load_fleet(session: AsyncSession) -> FleetView:
    """Everything a gateway routes by, as of the policy epoch read before the rows (so never too new)."""
    epoch = await tenants.policy_epoch(session)
    pools = await repository.pools(session)
    rows = await repository.replicas(session)
    return FleetView(
        epoch=epoch,
        pools=pools,
        replicas=[
            ReplicaRoute(
                replica=facts.replica,
                pool=facts.pool,
                url=facts.url,
                state=facts.state,
                boot_epoch=facts.boot_epoch,
                **_size(facts.ready),
            )
            for facts, _ in rows
        ],
    )


def _size(ready: CoreReady | None) -> dict[str, int]:
    """What a replica holds, as it told when it had loaded."""
    credit = credit_of(ready, Gauges())
    if ready is None or credit is None:
        return {}
    return {"context": ready.max_model_len, "slots": credit.slots, "tokens": credit.tokens}


async def list_pools(session: AsyncSession) -> list[PoolRoute]:
    """All pools in name order."""
    return await repository.pools(session)


async def served_models(session: AsyncSession) -> set[str]:
    """Models that tenants can use now: those of pools with a READY replica."""
    return await repository.served_models(session)


async def ensure_pool(session: AsyncSession, name: str, model: str, backend: str = "native") -> PoolRoute:
    """Create the pool, or change what it serves; a repeat changes nothing. Raises InvalidRequestError."""
    if not POOL_NAME.fullmatch(name):
        raise InvalidRequestError("a pool's name is 1 to 63 of a-z, 0-9, '.', '_' and '-'", param="name")
    if not 0 < len(model) <= 200 or not model.isprintable():
        raise InvalidRequestError("a model's name is 1 to 200 printable characters", param="model")
    if backend not in BACKENDS:
        raise InvalidRequestError(f"backend {backend!r} is not one of: {', '.join(BACKENDS)}", param="backend")
    await repository.put_pool(session, name, model, backend)
    return next(pool for pool in await repository.pools(session) if pool.name == name)


async def set_pool_size(session: AsyncSession, name: str, patch: PoolPatch) -> PoolRoute:
    """Say what each replica of the pool holds; what is left out stays. Raises NotFoundError."""
    pool = await repository.lock_pool(session, name)
    if pool is None:
        raise NotFoundError(f"there is no pool {name[:40]}", code="pool_not_found", param="pool")
    slots = pool.replica_slots if patch.replica_slots is UNSET else patch.replica_slots
    tokens = pool.replica_tokens if patch.replica_tokens is UNSET else patch.replica_tokens
    if (slots, tokens) != (pool.replica_slots, pool.replica_tokens):
        await repository.set_pool_size(session, name, slots, tokens)
    return structs.replace(pool, replica_slots=slots, replica_tokens=tokens)


async def list_replicas(session: AsyncSession, redis: Redis, now: float) -> list[ReplicaView]:
    """All replicas in pool and id order, with their live gauges where Redis has them. One query."""
    rows = await repository.replicas(session)
    gauges = await read_gauges(redis, [facts.replica for facts, _ in rows])
    return [_view(facts, times, gauges.get(facts.replica), now) for facts, times in rows]


def _view(facts: ReplicaFacts, times: ReplicaTimes, live: LiveGauges | None, now: float) -> ReplicaView:
    return ReplicaView(
        replica=facts.replica,
        pool=facts.pool,
        model=facts.model,
        url=facts.url,
        state=facts.state,
        state_reason=facts.state_reason,
        state_since=times.state_since,
        age_s=max(0.0, now - times.last_report_at),
        boot_epoch=facts.boot_epoch,
        core_epoch=facts.core_epoch,
        core_restarts=facts.core_restarts,
        started_at=facts.started_at,
        policy_epoch=facts.policy_epoch,
        ready=facts.ready,
        gauges=live.gauges if live is not None and live.boot_epoch == facts.boot_epoch else None,
    )


async def set_drain(session: AsyncSession, replica: str, wanted: bool, *, reason: str) -> ReplicaState:
    """Say whether `replica` is wanted drained; gateways stop routing to it at once, the replica hears it in its next
    acknowledgement. Returns its state. Raises NotFoundError. A repeat changes nothing."""
    facts = (await repository.lock_replicas(session, [replica])).get(replica)
    if facts is None:
        raise NotFoundError(f"there is no replica {replica[:40]}", code="replica_not_found", param="replica")
    if facts.drain_wanted == wanted:
        return facts.state
    await repository.set_drain_wanted(session, replica, wanted)
    state = effective(facts.state, wanted)
    await repository.add_events(
        session,
        [
            ReplicaEventDraft(
                replica=replica,
                kind=EventKind.DRAIN,
                after="wanted" if wanted else "not wanted",
                reason=reason,
                boot_epoch=facts.boot_epoch,
                core_epoch=facts.core_epoch,
            )
        ],
    )
    if state is not facts.state:
        await _transition(session, facts, state, reason)
    return state


async def _transition(session: AsyncSession, facts: ReplicaFacts, after: ReplicaState, reason: str) -> bool:
    """Move `facts` to `after` with its one event; False when the row has changed since it was read."""
    moved = await repository.move_state(
        session, facts.replica, before=facts.state, after=after, reason=reason, sequence=facts.sequence
    )
    if moved:
        event = ReplicaEventDraft(
            replica=facts.replica,
            kind=EventKind.STATE,
            before=facts.state,
            after=after,
            reason=reason,
            boot_epoch=facts.boot_epoch,
            core_epoch=facts.core_epoch,
        )
        await repository.add_events(session, [event])
    return moved


@dataclass(frozen=True, slots=True)
class Registration:
    """What became of one report: `refused` says why nothing of it may be stored."""

    commands: list[Command] = field(default_factory=list)
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Intake:
    """What became of a batch: one registration per report, in order, and the newest loads to publish."""

    registrations: list[Registration]
    loads: list[LiveLoad]


async def take_in(session: AsyncSession, reports: Sequence[Report], now: float) -> Intake:
    """Register and update the replicas of `reports` in at most five statements, whatever their number.

    A report from an unknown pool is refused. An old or repeated one changes no fact; its windows and usage are
    still good, because those are fenced on their own.
    """
    if not reports:
        return Intake([], [])
    pools = await repository.known_pools(session, sorted({report.pool for report in reports}))
    stored = await repository.lock_replicas(session, sorted({report.replica for report in reports}))
    newest = dict(stored)
    registrations: dict[int, Registration] = {}
    events: list[ReplicaEventDraft] = []
    loads: dict[str, LiveLoad] = {}
    order = sorted(range(len(reports)), key=lambda i: (reports[i].boot_epoch, reports[i].sequence))
    for i in order:
        report = reports[i]
        if report.pool not in pools:
            registrations[i] = Registration(refused=f"pool {report.pool!r} is not known")
            continue
        known = newest.get(report.replica)
        if is_newer(report, known):
            newest[report.replica], happened = apply(known, report, now)
            events += happened
            live = LiveGauges(at=now, boot_epoch=report.boot_epoch, gauges=report.gauges)
            loads[report.replica] = LiveLoad(report.replica, newest[report.replica].state, live)
        drain_wanted = newest[report.replica].drain_wanted
        registrations[i] = Registration(commands(stored.get(report.replica), drain_wanted, report))
    changed = [facts for replica, facts in newest.items() if facts is not stored.get(replica)]
    written = await repository.write_replicas(session, changed) if changed else {}
    await repository.add_events(session, [event for event in events if _happened(event, written)])
    return Intake(
        [registrations[i] for i in range(len(reports))],
        [load for replica, load in loads.items() if replica in written],
    )


def _happened(event: ReplicaEventDraft, written: Mapping[str, bool]) -> bool:
    """Whether the change was written, and by us: another control plane may have registered the replica first."""
    inserted = written.get(event.replica)
    return inserted is not None and (inserted or event.kind is not EventKind.REGISTERED)


async def conclude(session: AsyncSession, listening_since: float, now: float, limits: Limits) -> float:
    """Mark silent replicas STALE or LOST; returns in how many seconds to look again at the latest.

    `listening_since` and `now` are by the database's clock. Safe with any number of control planes: each
    transition is one conditional UPDATE, and who makes it writes its event.
    """
    soonest = limits.stale_after_s
    for facts, times in await repository.replicas_not_lost(session):
        silent_s = silence(now, times.last_report_at, listening_since)
        verdict = judge(facts.state, silent_s, limits)
        state = facts.state
        if verdict is not None:
            await _transition(session, facts, verdict.state, verdict.reason)
            state = verdict.state
        change_s = seconds_to_change(state, silent_s, limits)
        soonest = soonest if change_s is None else min(soonest, change_s)
    return soonest


async def usage_told_until(session: AsyncSession, replicas: Sequence[str]) -> dict[str, float]:
    """Of the replicas of `replicas` that tell their usage, up to when they have told all of it (Unix seconds, 0 when
    they never have). A replica that is not in the answer tells none. One query.
    """
    return await repository.usage_told_until(session, replicas)


async def oldest_usage_told(session: AsyncSession) -> float | None:
    """The time (Unix seconds) up to which every replica that is not LOST has told its usage; None without replicas."""
    return await repository.oldest_usage_told(session)


async def count_by_state(session: AsyncSession) -> dict[ReplicaState, int]:
    """How many replicas are in each state, those without any included."""
    counts = dict.fromkeys(ReplicaState, 0)
    for facts, _ in await repository.replicas(session):
        counts[facts.state] += 1
    return counts


async def forget(session: AsyncSession, *, events_after_s: float, lost_after_s: float, limit: int) -> int:
    """Delete old events and replicas long LOST, at most `limit` of each; returns how many rows went."""
    events = await repository.delete_events(session, events_after_s, limit)
    return events + await repository.delete_lost(session, lost_after_s, limit)
