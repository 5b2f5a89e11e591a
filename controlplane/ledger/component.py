"""The ledger domain's part of the control plane. Layer: service."""

from __future__ import annotations

from controlplane.component import Component, Resources
from controlplane.ledger.controllers import router


def component(resources: Resources) -> Component:
    """The admin API's routes; records come in through telemetry's intake."""
    return Component(routes=[router])
