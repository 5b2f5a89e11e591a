"""What metrics and API must say for an outage to count as shown."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from redis.asyncio import Redis

from controlplane.admission.leases import Leases
from controlplane.gateway.lease_metrics import LeaseCollector
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.lab.chaos import faults, watch
from controlplane.lab.chaos.cli import NAMES


@pytest.fixture
async def text(redis: Redis) -> str:
    """A gateway's own metrics when all is well."""
    registry = CollectorRegistry()
    LeaseCollector(Leases(redis), registry)
    GatewayMetrics(registry).observe(in_flight=lambda: 0.0, listening=lambda: 1.0, ready_replicas=lambda: 2.0)
    return generate_latest(registry).decode()


def test_all_is_well(text: str) -> None:
    assert watch.gateway_states(text, 2) == set()
    assert watch.replica_states([{"state": "ready"}, {"state": "draining"}]) == set()


@pytest.mark.parametrize(
    ("line", "instead", "state"),
    [
        ("lease_store_away 0.0", "lease_store_away 1.0", watch.LIMITS_DECIDE),
        ("policy_listening 1.0", "policy_listening 0.0", watch.POLICY_UNHEARD),
        ("ready_replicas 2.0", "ready_replicas 1.0", watch.REPLICAS_FEW),
        ("clock_offset_seconds 0.0", "clock_offset_seconds -90.0", watch.CLOCK_OFF),
    ],
)
def test_each_gateway_state_is_read_from_a_metric_that_exists(text: str, line: str, instead: str, state: str) -> None:
    assert f"tidegate_gateway_{line}\n" in text
    assert watch.gateway_states(text.replace(line, instead), 2) == {state}


def test_a_silent_replica_is_shown() -> None:
    assert watch.replica_states([{"state": "ready"}, {"state": "stale"}]) == {watch.REPLICA_SILENT}


def test_the_command_knows_every_fault() -> None:
    assert faults.NAMES == NAMES
    for fault in faults.FAULTS:
        assert fault.expected, f"nothing would show {fault.name}"
