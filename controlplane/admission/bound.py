"""How far a limit can be overspent when the store is away: the published bound.

Layer: service. Pure.
"""

from __future__ import annotations

from controlplane.admission.charges import COUNTERS, Counter
from controlplane.quotas.schemas import Away, Limit

MINUTE_S = 60.0


def overspend_bound(
    limit: Limit,
    *,
    gateways: int,
    outage_s: float,
    restarts: int = 0,
    store_lost: bool = False,
    units_per_s: float | None = None,
) -> int | None:
    """The most units beyond `limit.hard` that can be admitted in one of its windows which meets outages of `outage_s`
    seconds in all, by `gateways` processes of which `restarts` were started anew meanwhile. None: there is no bound.

    With R gateways and a hard limit L:

    - The store admits at most L in any window, and a gateway counts for itself only what the store did not. So what is
      beyond L is what was admitted without the store.
    - CLOSED admits nothing without it: 0.
    - LOCAL(n) admits at most n in any window of the same kind in each process, and keeps that count when the store
      comes and goes: R·n. A process that starts anew has forgotten its count: one more n for each.
    - OPEN counts nothing. A gateway that passes at most u units a second (`units_per_s`; for concurrency, starts a
      second) admits u·t in t seconds: R·u·min(outage, 60) for a minute, R·u·outage for a calendar window and for
      concurrency. Without u there is no bound.
    - A store that comes back empty has forgotten the minute and the live leases, of which it may have admitted L
      before: one more L. Calendar counters are cold then and are hydrated from the ledger, so nothing is added but
      what the ledger did not have yet.
    - A request under way when the store failed may be counted by both: that only lowers what is admitted.

    The actual use of a request above its reservation is not in it; it is bounded by what the engine may produce.
    """
    counter = COUNTERS.get(limit.kind)
    if limit.hard is None or counter is None:
        return None if limit.hard is None else 0
    forgotten = limit.hard if store_lost and counter is not Counter.CALENDAR else 0
    if limit.away is Away.CLOSED:
        return forgotten
    if limit.away is Away.LOCAL:
        return (gateways + restarts) * limit.local + forgotten
    if units_per_s is None:
        return None
    seconds = min(outage_s, MINUTE_S) if counter is Counter.RATE else outage_s
    return int(gateways * units_per_s * seconds) + forgotten
