"""The fleet domain's part of the control plane: the admin API and the look-out for silent replicas. Layer: service."""

from __future__ import annotations

from controlplane.background import running
from controlplane.component import Component, Resources
from controlplane.fleet.controllers import router
from controlplane.fleet.liveness import Limits
from controlplane.fleet.watcher import Watcher


def component(resources: Resources) -> Component:
    """Routes and the watcher."""
    watcher = Watcher(resources.engine, Limits.of(resources.settings))
    return Component(routes=[router], lifespans=[running(watch_replicas=watcher.run)])
