"""What happens to this process's leases, for Prometheus.

Layer: service. Read from the leases' own tally when scraped; no label comes from a client.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.admission.leases import Leases

ASKED = ("granted", "refused", "cold", "away_refused", "away_local", "away_open")
"""How requests for leases were answered; `away_*` without the store."""
UNANSWERED = ("not_answered", "not_asked")
ENDED = ("settled", "late", "fenced", "deferred", "reasserted")


class LeaseCollector(Collector):
    """Registers itself in `registry` under `tidegate_gateway_lease*`."""

    def __init__(self, leases: Leases, registry: CollectorRegistry) -> None:
        self._leases = leases
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        leases = self._leases
        yield self._counter("lease_answers", "Leases asked for, by answer; away_* were decided without Redis.", ASKED)
        yield self._counter("lease_calls_failed", "Calls that Redis did not answer in time, or was spared.", UNANSWERED)
        yield self._counter("lease_endings", "Leases settled, and what was unusual about others.", ENDED)
        yield CounterMetricFamily(
            "tidegate_gateway_lease_overrun_units",
            "Units used above what was reserved, and charged all the same.",
            value=leases.tally.overrun_units,
        )
        yield CounterMetricFamily(
            "tidegate_gateway_lease_endings_lost",
            "Endings Redis will never be told of, because too many waited.",
            value=leases.dropped,
        )
        for name, text, value in (
            ("leases_in_flight", "Leases this process holds.", leases.in_flight),
            ("lease_endings_waiting", "Endings Redis has not been told of yet.", leases.deferred),
            (
                "lease_store_away",
                "1 while Redis does not answer; limits then act as they declare.",
                leases.is_away,
            ),
            (
                "clock_offset_seconds",
                "How far this gateway's clock is ahead of that of Redis, as of the last lease.",
                leases.clock_offset_s,
            ),
        ):
            yield GaugeMetricFamily(f"tidegate_gateway_{name}", text, value=float(value))

    def _counter(self, name: str, text: str, kinds: tuple[str, ...]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"tidegate_gateway_{name}", text, labels=("result",))
        for kind in kinds:
            family.add_metric((kind,), getattr(self._leases.tally, kind))
        return family
