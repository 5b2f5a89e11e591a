"""The ledger domain's part of the control plane. Layer: service."""

from __future__ import annotations

from controlplane.component import Component, Resources
from controlplane.ledger.controllers import router


def component(resources: Resources) -> Component:
    """The admin API's routes. Records come in through telemetry: reports of replicas, the stream of gateways."""
    return Component(routes=[router])
