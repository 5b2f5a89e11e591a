"""Whether a request would reach the replica that was just started.

Layer: service. Asks the control plane where the replica is, and the gateway how many it may use: a row left by an
earlier run names another address, and the gateway hears of a change a moment after it was made.
"""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass

import msgspec

from controlplane.local.client import Client
from controlplane.settings import Secret
from dataplane.protocol import ReplicaState

TIMEOUT_S = 2.0
READY_REPLICAS = re.compile(r"^tidegate_gateway_ready_replicas (\S+)$", re.MULTILINE)


class _Row(msgspec.Struct, frozen=True):
    """What is asked of a line of the replicas' list."""

    url: str
    state: ReplicaState


@dataclass(frozen=True, slots=True)
class RouteProbe:
    """One call is one attempt."""

    control_url: str
    gateway_url: str
    replica_url: str
    api_token: Secret
    metrics_token: Secret

    def __call__(self) -> str | None:
        """What is known once there is nothing left to wait for, else None."""
        try:
            match self._state():
                case ReplicaState.READY if self._routable():
                    return "the gateway knows the replica"
                case ReplicaState.DRAINING:
                    return "an operator drained the replica; no request is sent to it"
                case _:
                    return None
        except (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError):
            return None

    def _state(self) -> ReplicaState | None:
        answer = Client(self.control_url, self.api_token.reveal()).call("GET", "/api/v1/replicas", timeout=TIMEOUT_S)
        rows = msgspec.json.decode(answer.body, type=list[_Row]) if answer.status == 200 else []
        return next((row.state for row in rows if row.url == self.replica_url), None)

    def _routable(self) -> bool:
        answer = Client(self.gateway_url, self.metrics_token.reveal()).call("GET", "/metrics", timeout=TIMEOUT_S)
        found = READY_REPLICAS.search(answer.body.decode())
        return found is not None and float(found.group(1)) >= 1.0
