"""The request log's part of the control plane. Layer: service."""

from __future__ import annotations

from controlplane.component import Component, Resources
from controlplane.promptlog.controllers import router, take_logged_requests


def component(resources: Resources) -> Component:
    """The admin API's routes and where gateways deliver; the worker forgets what is old."""
    return Component(routes=[router, take_logged_requests])
