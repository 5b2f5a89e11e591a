"""Canaries: which there are, what is known of each, and who runs them when.

Layer: service. Every function takes the caller's session and never commits. A run covers all canaries; one at a time is
under way, claimed by (run, fence): a redelivered job finds its claim taken over, and what lost its claim writes nothing
(F38, F39). It sends no request: `proof` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from msgspec import structs
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.canaries import repository
from controlplane.canaries.models import Canary
from controlplane.canaries.repository import Run
from controlplane.canaries.schemas import (
    LONGEST_WHY,
    CanaryRun,
    CanaryState,
    CanaryView,
    Cell,
    Marks,
    Proof,
    state_of,
)
from controlplane.errors import InvalidRequestError
from controlplane.gateway.paths import INFERENCE
from controlplane.paging import Cursor, Page, checked, decode, page
from controlplane.quotas.schemas import QuotaKind, QuotaLevel

CLAIM_TTL_S = 60.0
"""A worker that writes nothing for so long loses its run to whoever asks next."""
NO_REPLICA = "no replica is ready"
MOST_CANARIES = 10_000
"""All there can be; what shows all of them at once is bounded by it."""
_BEGINNING = datetime.fromtimestamp(0, UTC)


class StaleRunError(Exception):
    """The run was taken over or is finished; nothing more of it may be written."""


def cells(gateways: Iterable[str]) -> list[Cell]:
    """Every limit kind × level × endpoint × gateway, by gateway."""
    combined = itertools.product(gateways, INFERENCE, QuotaLevel, QuotaKind)
    found = [Cell(gateway=at, endpoint=path, level=level, kind=kind) for at, path, level, kind in combined]
    return found[:MOST_CANARIES]


async def list_canaries(
    session: AsyncSession, *, every_s: float, after: str | None = None, limit: int = 50
) -> Page[CanaryView]:
    """Canaries by gateway, endpoint, level and kind. One query. Raises InvalidRequestError."""
    limit = checked(limit)
    now = datetime.now(UTC)
    rows = await repository.canaries(session, after=_after(after), limit=limit)
    return page(rows, limit, lambda row: _view(row, now, every_s), lambda row: Cursor(_BEGINNING, str(row.id)))


async def all_canaries(session: AsyncSession, *, every_s: float) -> list[CanaryView]:
    """All of them. One query."""
    now = datetime.now(UTC)
    return [_view(row, now, every_s) for row in await repository.canaries(session, after=0, limit=MOST_CANARIES)]


async def ask(session: AsyncSession) -> CanaryRun:
    """Have all canaries run now, beside the schedule. A repeat within the second is the same run."""
    window_start = int(datetime.now(UTC).timestamp())
    await repository.add_run(session, window_start)
    return CanaryRun(window_start=window_start, canaries=await repository.count(session))


async def claim(
    session: AsyncSession, *, gateways: Sequence[str], every_s: float, holder: str, now: float, ready: bool = False
) -> Run | None:
    """Make this schedule's run due once `every_s` have passed since the last one, also over a restart, and claim the
    newest that is due; None when there is none or one is under way. `ready` says that a replica is: what the last run
    could not try for want of one is tried at once.
    """
    if not await repository.try_lock(session):
        return None
    last = await repository.last_run(session)
    if last is None or not now - every_s < last < now + every_s:  # one from the future is of a clock that was wrong
        await repository.add_run(session, int(now // every_s * every_s))
    if ready and await repository.lacked(session, NO_REPLICA):
        await repository.add_run(session, int(now))
    run = await repository.claim(session, holder=holder, ttl_s=CLAIM_TTL_S)
    if run is not None:
        await repository.keep_cells(session, cells(gateways))
    return run


async def begin(session: AsyncSession, run: Run, *, holder: str) -> Run:
    """Start the work on a claimed run, once. Raises StaleRunError for a repeat."""
    own = await repository.take_over(session, run, holder=holder, ttl_s=CLAIM_TTL_S)
    if own is None:
        raise StaleRunError(f"canaries {run.window_start}: claim {run.fence} was taken over or is done")
    return own


async def due(session: AsyncSession, run: Run, limit: int) -> list[tuple[int, Cell]]:
    """At most `limit` canaries that the run has not come to: their ids and what they prove."""
    return [(row.id, _cell(row)) for row in await repository.due(session, run.window_start, limit)]


async def conclude(session: AsyncSession, run: Run, canary_id: int, proof: Proof) -> None:
    """Write down how a probe ended. Raises StaleRunError when the run is not this one's any more."""
    if not await repository.extend(session, run, ttl_s=CLAIM_TTL_S):
        raise StaleRunError(f"canaries {run.window_start}: claim {run.fence} was taken over")
    await repository.conclude(session, run, canary_id, structs.replace(proof, why=proof.why[:LONGEST_WHY]))


async def end(session: AsyncSession, run: Run) -> bool:
    """Finish the run, or leave the rest of it to the next claim; True when it is over. Raises StaleRunError."""
    over = not await repository.due(session, run.window_start, 1)
    done = await (repository.finish(session, run) if over else repository.give_back(session, run))
    if not done:
        raise StaleRunError(f"canaries {run.window_start}: claim {run.fence} was taken over")
    return over


def _view(row: Canary, now: datetime, every_s: float) -> CanaryView:
    marks = Marks(proven_at=row.proven_at, failed_at=row.failed_at, not_run_at=row.not_run_at)
    state = state_of(marks, now, every_s)
    return CanaryView(
        id=row.id,
        **{name: getattr(row, name) for name in ("gateway", "endpoint", "why", "seconds")},
        level=QuotaLevel(row.level),
        kind=QuotaKind(row.kind),
        state=state,
        proven_at=row.proven_at,
        failed_at=row.failed_at,
        not_run_at=row.not_run_at,
    )


def worst(views: Iterable[CanaryView]) -> dict[tuple[QuotaLevel, QuotaKind], CanaryView]:
    """Of each level and kind the canary that is worst off, the one proven longest ago among equals."""
    order = (
        CanaryState.FAILING,
        CanaryState.OVERDUE,
        CanaryState.NOT_RUN,
        CanaryState.NEVER_RUN,
        CanaryState.PROVEN,
    )
    found: dict[tuple[QuotaLevel, QuotaKind], CanaryView] = {}
    for view in sorted(views, key=lambda one: (order.index(one.state), one.proven_at or _BEGINNING)):
        found.setdefault((view.level, view.kind), view)
    return found


def _cell(row: Canary) -> Cell:
    return Cell(gateway=row.gateway, endpoint=row.endpoint, level=QuotaLevel(row.level), kind=QuotaKind(row.kind))


def _after(text: str | None) -> int:
    cursor = decode(text)
    if cursor is None:
        return 0
    if not cursor.id.isdecimal() or len(cursor.id) > 18:
        raise InvalidRequestError("the cursor is not one of this list", param="after")
    return int(cursor.id)
