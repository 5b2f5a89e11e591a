"""The state of this process's usage records, for Prometheus. Layer: service. Read when scraped; it has no labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.gateway.usage import UsageLog


class UsageCollector(Collector):
    """Registers itself in `registry` under `tidegate_gateway_usage_*`."""

    def __init__(self, usage: UsageLog, registry: CollectorRegistry, wall: Callable[[], float] = time.time) -> None:
        self._usage = usage
        self._wall = wall
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        usage = self._usage
        for name, text, count in (
            ("records", "Usage records put into the spool.", usage.written),
            ("records_lost", "Usage records without room or disk; the replica's own may still come.", usage.lost),
            ("records_shipped", "Usage records that the ledger has acknowledged.", usage.shipped),
            ("resends", "How often what Redis had lost was sent again, a window at a time.", usage.resent),
            ("spool_skipped_bytes", "Bytes of the spool that were no whole record.", usage.skipped_bytes),
        ):
            yield CounterMetricFamily(f"tidegate_gateway_usage_{name}", text, value=float(count))
        oldest = usage.oldest_at
        for name, text, value in (
            ("spool_bytes", "Usage that is not known to be in the ledger.", usage.waiting_bytes),
            (
                "spool_age_seconds",
                "Age of the oldest of it; 0 without any.",
                0.0 if oldest is None else max(0.0, self._wall() - oldest),
            ),
            ("records_under_way", "Usage records sent and not acknowledged.", usage.under_way),
            ("spool_full", "1 while the spool is so full that requests are refused.", not usage.accepting),
        ):
            yield GaugeMetricFamily(f"tidegate_gateway_usage_{name}", text, value=float(value))
