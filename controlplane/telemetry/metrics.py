"""What the control plane counts about its own intake.

Layer: service. Prometheus metrics of one process in its own registry. Label values are fixed words or come from
`KnownLabels`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from controlplane.canaries.schemas import CanaryState, CanaryView
from controlplane.ledger.service import Taken
from controlplane.telemetry.labels import KnownLabels
from controlplane.telemetry.taskstats import OUTCOMES, TaskCount
from controlplane.telemetry.windows import ENGINE, GATEWAY
from dataplane.protocol import ReplicaState, UsageRecord


class Refusal(enum.StrEnum):
    """Why a report or a part of one was not stored."""

    UNREADABLE = "unreadable"
    IDENTITY = "identity"
    ADDRESS = "address"
    WINDOW = "window"
    USAGE = "usage"
    QUEUE_FULL = "queue_full"
    STORE_AWAY = "store_away"
    DEFECT = "defect"


class Unbilled(enum.StrEnum):
    """Why a usage record was set aside: no bill could carry it, or it came after its gateway's count was billed."""

    UNFIT = "unfit"
    LATE = "late"


UNBILLED = ((ENGINE, Unbilled.UNFIT), (ENGINE, Unbilled.LATE), (GATEWAY, Unbilled.UNFIT))
"""Whose records are set aside, and why. A gateway's is never late: its replica's own goes before it."""


class IntakeMetrics:
    """Counters of the ingest path, and gauges that a scrape refreshes from the database."""

    def __init__(self, registry: CollectorRegistry, labels: KnownLabels) -> None:
        self._labels = labels
        self.reports = Counter("tidegate_reports", "Reports stored and acknowledged", ["source"], registry=registry)
        self.refused = Counter(
            "tidegate_reports_refused",
            "Reports, windows, series or usage records not stored",
            ["source", "cause"],
            registry=registry,
        )
        self.batch = Histogram(
            "tidegate_ingest_batch_reports",
            "Reports stored by one transaction",
            buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500),
            registry=registry,
        )
        self.seconds = Histogram(
            "tidegate_ingest_seconds",
            "Time of one ingest transaction",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15),
            registry=registry,
        )
        self.queue = Gauge("tidegate_ingest_queue_reports", "Reports waiting to be stored", registry=registry)
        self.usage_records = Counter(
            "tidegate_usage_records", "Attempts added to the ledger by this process", registry=registry
        )
        self.usage_tokens = Counter(
            "tidegate_usage_tokens",
            "Tokens added to the ledger by this process",
            ["tenant", "model", "kind"],
            registry=registry,
        )
        self.usage_refused = Counter(
            "tidegate_usage_refused_records",
            "Usage records that were set aside and are on no bill: no ledger could hold them, or they came too late.",
            ["source", "cause"],
            registry=registry,
        )
        for source, cause in UNBILLED:
            self.usage_refused.labels(source, cause.value)
        self.usage_stream = Counter(
            "tidegate_usage_stream_records",
            "Usage records taken from gateways: stored at once, held for the replica's own, or known before.",
            ["result"],
            registry=registry,
        )
        self.usage_settled = Counter(
            "tidegate_usage_settled_by_gateway",
            "Attempts stored as their gateway counted them, because no replica will tell any more.",
            registry=registry,
        )
        self.usage_held = Gauge(
            "tidegate_usage_held_records", "Gateways' counts that wait for the replica's own.", registry=registry
        )
        self.usage_complete_until = Gauge(
            "tidegate_usage_complete_until_seconds",
            "The ledger has all attempts that ended before this time (Unix seconds), as far as reporters are heard.",
            registry=registry,
        )
        self.replicas = Gauge("tidegate_replicas", "Replicas by state", ["state"], registry=registry)
        self.rollup_lag = Gauge(
            "tidegate_rollup_lag_seconds", "Age of the oldest closed window not rolled up", ["job"], registry=registry
        )
        self.ledger_rows = Gauge(
            "tidegate_ledger_rows_estimate", "Rows of the ledger by the planner's statistics", registry=registry
        )
        self.canaries = Gauge(
            "tidegate_canaries", "Canaries by what is known of their limit", ["state"], registry=registry
        )
        self.canary_proven = Gauge(
            "tidegate_canary_last_proven_seconds",
            "Unix time at which a limit was last proven; 0 for never",
            ["gateway", "endpoint", "level", "kind"],
            registry=registry,
        )
        self.shown = ShownCounters()
        registry.register(self.shown)

    def count_usage(self, records: Iterable[UsageRecord]) -> None:
        """Count attempts that are new in the ledger."""
        for record in records:
            tenant, model = self._labels.tenant(record.tenant), self._labels.model(record.model)
            self.usage_records.inc()
            self.usage_tokens.labels(tenant, model, "prompt").inc(record.prompt_tokens)
            self.usage_tokens.labels(tenant, model, "cached").inc(record.cached_tokens)
            self.usage_tokens.labels(tenant, model, "output").inc(record.output_tokens)

    def count_refused(self, source: str, cause: Unbilled, number: int) -> None:
        """Count records that were set aside; `source` and `cause` are one of UNBILLED."""
        self.usage_refused.labels(source, cause.value).inc(number)

    def count_taken(self, taken: Taken) -> None:
        """Count a batch of gateways' records."""
        for result, number in (("stored", len(taken.stored)), ("held", taken.held), ("known", taken.known)):
            self.usage_stream.labels(result).inc(number)

    def count_settled(self, records: Sequence[UsageRecord]) -> None:
        """Count attempts whose row is their gateway's count."""
        self.usage_settled.inc(len(records))
        self.count_usage(records)

    def show_replicas(self, counts: dict[ReplicaState, int]) -> None:
        for state, number in counts.items():
            self.replicas.labels(state.value).set(number)

    def show_canaries(self, views: Iterable[CanaryView]) -> None:
        """Every label value is one of a fixed set: gateways of the settings, endpoints of the table, levels, kinds."""
        counts = dict.fromkeys(CanaryState, 0)
        self.canary_proven.clear()
        for view in views:
            counts[view.state] += 1
            proven = self.canary_proven.labels(view.gateway, view.endpoint, view.level.value, view.kind.value)
            proven.set(view.proven_at.timestamp() if view.proven_at else 0.0)
        for state, number in counts.items():
            self.canaries.labels(state.value).set(number)


class ShownCounters(Collector):
    """Counters kept elsewhere (by the workers in Redis, by the publisher) and only shown here, so they never fall."""

    def __init__(self) -> None:
        self.tasks: list[TaskCount] = []
        self.loads_published = 0
        self.load_failures = 0

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The families as of the last look."""
        runs = CounterMetricFamily(
            "tidegate_task_runs", "Runs of background jobs over all workers", labels=["task", "outcome"]
        )
        seconds = CounterMetricFamily(
            "tidegate_task_seconds", "Seconds spent in background jobs over all workers", labels=["task"]
        )
        for count in self.tasks:
            for outcome in OUTCOMES:
                runs.add_metric([count.task, outcome], getattr(count, outcome))
            seconds.add_metric([count.task], count.seconds)
        yield runs
        yield seconds
        yield CounterMetricFamily(
            "tidegate_loads_published",
            "Replica loads published to gateways by this process",
            value=self.loads_published,
        )
        yield CounterMetricFamily(
            "tidegate_load_publish_failures",
            "Publications given up because Redis was away",
            value=self.load_failures,
        )
