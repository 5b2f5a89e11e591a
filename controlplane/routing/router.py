"""Choose the replica of one request.

Layer: service. Pure: `decide(snapshot, now, rng)` filters, scores and picks; the same snapshot and seed give the same
decision, so a stored decision can be replayed (DESIGN §4). It must never do I/O or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from controlplane.decision import Decision, Rejection
from controlplane.routing.candidates import Candidate, RoutingSnapshot
from controlplane.routing.filters import FILTERS
from controlplane.routing.scorers import Scorer, least_loaded

POLICY_VERSION = "least-loaded/1"


def decide(snapshot: RoutingSnapshot, now: float, rng: Random, scorer: Scorer = least_loaded) -> Decision[Candidate]:
    """The cheapest surviving candidate; ties are broken evenly by `rng`, whatever the candidates' order.

    `now` is part of every policy's signature; ages are already judged in the snapshot's states, so this policy's
    choice does not depend on it.

    `choice` is None when nobody survives; `rejected` then says why for each.
    """
    survivors: Sequence[Candidate] = snapshot.candidates
    rejected: list[Rejection] = []
    for keep in FILTERS:
        filtered = keep(survivors, snapshot)
        survivors = filtered.survivors
        rejected += filtered.rejected
        if not survivors:
            return Decision(
                choice=None,
                reasons=[f"no replica can take requests for {snapshot.model!r}"],
                rejected=rejected,
                policy_version=POLICY_VERSION,
            )
    scores = [scorer(candidate) for candidate in survivors]
    lowest = min(score.cost for score in scores)
    tied = [i for i, score in enumerate(scores) if score.cost == lowest]
    if len(tied) > 1:
        tied.sort(key=lambda i: survivors[i].replica)
        winner = tied[rng.randrange(len(tied))]
    else:
        winner = tied[0]
    chosen = survivors[winner]
    reasons = [scores[winner].reason]
    if len(tied) > 1:
        reasons.append(f"drawn among {len(tied)} of equal load")
    return Decision(
        choice=chosen,
        reasons=reasons,
        alternatives=[c.replica for c in survivors if c is not chosen],
        rejected=rejected,
        policy_version=POLICY_VERSION,
    )
