"""How far a limit can be overspent when the store is away: the published bound.

Layer: service. Pure.
"""

from __future__ import annotations

import math

from controlplane.admission.charges import COUNTERS, Counter
from controlplane.admission.circuit import LONGEST_PAUSE_S
from controlplane.quotas.schemas import Away, Limit

MINUTE_S = 60.0


def overspend_bound(
    limit: Limit,
    *,
    gateways: int,
    outage_s: float,
    outages: int = 1,
    restarts: int = 0,
    store_lost: bool = False,
    units_per_s: float | None = None,
) -> int | None:
    """The most units beyond `limit.hard` that can be admitted in one of its windows which meets `outages` of `outage_s`
    seconds in all, by `gateways` processes of which `restarts` were started anew meanwhile. None: there is no bound.

    With R gateways and a hard limit L:

    - The store admits at most L in any window, and a gateway counts for itself only what the store did not. So what is
      beyond L is what was admitted without the store.
    - CLOSED admits nothing without it: 0.
    - LOCAL(n) admits at most n in any window of the same kind in each process, and keeps that count when the store
      comes and goes: R·n. A process that starts anew has forgotten its count: one more n for each.
    - OPEN counts nothing. A gateway that passes at most u units a second (`units_per_s`; for concurrency, starts a
      second) admits u·t in t seconds, where t is all outages and, after each, the longest pause until the gateway asks
      the store again: R·u·min(t, 60) for a minute, R·u·t for a calendar window and for concurrency. Without u there is
      no bound.
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
    unheard_s = outage_s + outages * LONGEST_PAUSE_S
    seconds = min(unheard_s, MINUTE_S) if counter is Counter.RATE else unheard_s
    return math.ceil(gateways * units_per_s * seconds) + forgotten
