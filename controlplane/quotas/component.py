"""The quotas domain's part of the control plane. Layer: service."""

from __future__ import annotations

from controlplane.component import Component, Resources
from controlplane.quotas.controllers import router


def component(resources: Resources) -> Component:
    """The admin API's routes; the domain runs nothing in the background."""
    return Component(routes=[router])
