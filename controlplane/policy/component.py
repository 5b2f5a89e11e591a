"""The policy domain's part of the control plane. Layer: service."""

from __future__ import annotations

from controlplane.component import Component, Resources
from controlplane.policy.controllers import router


def component(resources: Resources) -> Component:
    """The admin API's routes; the worker keeps the history bounded."""
    return Component(routes=[router])
