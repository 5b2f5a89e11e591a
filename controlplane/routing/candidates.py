"""What a routing decision looks at.

Layer: service. Plain data: the live gateway and the simulator fill the same snapshot, and a stored snapshot
replays to the same decision. It must never hold a connection, a clock or anything that changes under the reader.
"""

from __future__ import annotations

import msgspec

from dataplane.protocol import ReplicaState


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One replica of a pool that serves the wanted model.

    `in_flight` counts this gateway's own requests on it; `others` estimates everybody else's from the replica's last
    report (0 when unknown). `suspect` says that it refused or dropped a connection since its last report.
    """

    replica: str
    pool: str
    url: str
    state: ReplicaState
    in_flight: int = 0
    others: int = 0
    suspect: bool = False


class RoutingSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All inputs of one decision.

    `current` is False while the gateway cannot hear of changes (Postgres away): states may then be old, and the
    filters let old bad news through as a last resort. `excluded` names replicas already tried for this request.
    """

    model: str
    candidates: tuple[Candidate, ...]
    current: bool = True
    excluded: frozenset[str] = frozenset()
