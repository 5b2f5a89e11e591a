"""A worker that cannot be asked is not ready; asking never fails."""

from __future__ import annotations

from pathlib import Path

import redis

from controlplane.local.ports import free_ports
from controlplane.local.valkey import EmbeddedValkey
from controlplane.local.worker_probe import WorkerProbe
from controlplane.settings import Secret


def test_a_broker_that_is_away_means_not_ready() -> None:
    assert WorkerProbe(Secret(f"redis://127.0.0.1:{free_ports(1)[0]}/0"))() is False


def test_a_broker_that_refuses_writes_means_not_ready(tmp_path: Path) -> None:
    """As a full disk makes it (MISCONF); asking for absent replicas refuses the same commands without filling one."""
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("min-replicas-to-write", 1)
        assert WorkerProbe(Secret(server.url))() is False
    finally:
        server.stop()
