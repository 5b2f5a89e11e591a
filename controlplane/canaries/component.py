"""The canaries' part of the control plane. Layer: service."""

from __future__ import annotations

from controlplane.canaries.controllers import router
from controlplane.component import Component, Resources


def component(resources: Resources) -> Component:
    """The admin API's routes; the worker runs the canaries."""
    return Component(routes=[router])
