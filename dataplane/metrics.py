"""The replica's /metrics in Prometheus text.

Layer: service. Renders the counters of the windows and the gauges of the core at scrape time; it counts nothing
itself. Counters come from `WindowBook.totals`, which outlives the core, so they never fall while this process
lives. No tenant appears here: label values are fixed words and the replica's own names.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dataplane.protocol import Counters, Histogram, ReplicaState
from dataplane.replica import Replica

PREFIX = "tidegate_engine"
FIRST_EDGE, LAST_EDGE = -80, 72
"""Exponential indices of the first and last finite bucket: 2^-10 s (about 1 ms) and 2^9 s (512 s)."""
EDGE_STEP = 4
"""Every half octave; these edges are edges of `Histogram` too, so the counts are exact."""
STATES = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.FAILED)


class ReplicaCollector(Collector):
    """All metrics of one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def collect(self) -> Iterable[Metric]:
        totals = self._replica.book.totals()
        yield from self._identity()
        yield from self._state()
        yield from _service(totals)
        yield from _scheduling(totals)
        yield from _memory(totals)
        yield from _runtime(totals)

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked of the replica at registration."""
        return []

    def _identity(self) -> Iterable[Metric]:
        config, ready = self._replica.config, self._replica.ready
        info = {"replica": config.replica, "pool": config.pool, "model": config.served_model}
        if ready is not None:
            info |= {"device": ready.device, "attention_backend": ready.attention_backend, "forward": ready.forward}
            info |= {"kernel_tier": ready.kernel_tier, "weights": ready.weights}
        yield InfoMetricFamily(PREFIX, "What this replica serves", value=info)

    def _state(self) -> Iterable[Metric]:
        replica, gauges = self._replica, self._replica.gauges
        state = GaugeMetricFamily(f"{PREFIX}_state", "1 for the state the replica is in", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(replica.state is name))
        yield state
        yield CounterMetricFamily(
            f"{PREFIX}_core_restarts", "Times the engine core was started again", replica.core.restarts
        )
        yield GaugeMetricFamily(f"{PREFIX}_requests_running", "Requests in the running batch", gauges.running)
        yield GaugeMetricFamily(f"{PREFIX}_requests_waiting", "Requests in the waiting queue", gauges.waiting)
        yield GaugeMetricFamily(
            f"{PREFIX}_requests_waiting_for_remote_kv",
            "Requests whose KV is being loaded from elsewhere",
            gauges.waiting_for_remote_kv,
        )
        blocks = GaugeMetricFamily(f"{PREFIX}_kv_blocks", "KV blocks by state", labels=["state"])
        blocks.add_metric(["total"], gauges.blocks_total)
        blocks.add_metric(["used"], gauges.blocks_used)
        blocks.add_metric(["cached"], gauges.blocks_cached)
        blocks.add_metric(["free"], gauges.blocks_free)
        yield blocks
        host = GaugeMetricFamily(f"{PREFIX}_host_kv_blocks", "KV blocks in host memory by state", labels=["state"])
        host.add_metric(["total"], gauges.host_blocks_total)
        host.add_metric(["used"], gauges.host_blocks_used)
        yield host
        used = gauges.blocks_used / gauges.blocks_total if gauges.blocks_total else 0.0
        yield GaugeMetricFamily(f"{PREFIX}_kv_cache_usage_ratio", "KV blocks in use, 0 to 1", used)
        yield GaugeMetricFamily(
            f"{PREFIX}_kv_slots_empty", "Allocated KV slots that hold no token", gauges.kv_slots_empty
        )
        if gauges.recent_hit_ratio is not None:
            yield GaugeMetricFamily(
                f"{PREFIX}_prefix_cache_recent_hit_ratio",
                "Prompt tokens of the latest requests that the prefix cache held, 0 to 1",
                gauges.recent_hit_ratio,
            )
        journal = replica.journal
        yield GaugeMetricFamily(f"{PREFIX}_usage_records_waiting", "Usage records not acknowledged", len(journal))
        yield GaugeMetricFamily(f"{PREFIX}_usage_records_unwritten", "Usage records not on disk yet", journal.unwritten)
        yield CounterMetricFamily(f"{PREFIX}_usage_records_dropped", "Usage records lost to the limit", journal.dropped)
        yield GaugeMetricFamily(
            f"{PREFIX}_report_windows_waiting", "Report windows not acknowledged", replica.book.waiting
        )


def registry_of(replica: Replica) -> CollectorRegistry:
    """A registry of this replica alone."""
    registry = CollectorRegistry()
    registry.register(ReplicaCollector(replica))
    return registry


def _service(totals: Counters) -> Iterable[Metric]:
    service = totals.service
    yield CounterMetricFamily(f"{PREFIX}_requests_received", "Sequences given to the engine", service.received)
    yield _labelled("requests_finished", "Sequences ended, by reason", "reason", service.finished)
    for name, text, histogram in (
        ("time_to_first_token_seconds", "Arrival at the replica to the first token", service.ttft),
        ("time_per_output_token_seconds", "(last - first) / (n - 1) of each sequence", service.tpot),
        ("inter_token_latency_seconds", "Gap before each token", service.itl),
        ("inter_token_latency_with_prefill_seconds", "Gap of steps that also prefilled", service.itl_with_prefill),
        ("e2e_request_latency_seconds", "Arrival at the replica to the end", service.e2e),
        ("request_queue_time_seconds", "Queued to scheduled", service.queue),
        ("request_prefill_time_seconds", "Scheduled to the first token", service.prefill),
        ("request_decode_time_seconds", "First to last token", service.decode),
    ):
        yield _histogram(name, text, histogram)


def _scheduling(totals: Counters) -> Iterable[Metric]:
    scheduling = totals.scheduling
    yield CounterMetricFamily(f"{PREFIX}_steps", "Engine steps", scheduling.steps)
    yield CounterMetricFamily(f"{PREFIX}_tokens_scheduled", "Tokens computed by steps", scheduling.tokens_scheduled)
    yield CounterMetricFamily(f"{PREFIX}_token_budget", "Tokens the steps had room for", scheduling.token_budget)
    yield CounterMetricFamily(f"{PREFIX}_prompt_tokens", "Prompt tokens taken in", scheduling.prompt_tokens)
    yield CounterMetricFamily(f"{PREFIX}_output_tokens", "Tokens generated", scheduling.output_tokens)
    yield _labelled("preemptions", "Running requests sent back to the queue", "cause", scheduling.preemptions)


def _memory(totals: Counters) -> Iterable[Metric]:
    memory = totals.memory
    queries = CounterMetricFamily(f"{PREFIX}_prefix_cache_queries", "Tokens looked up", labels=["attempt"])
    hits = CounterMetricFamily(f"{PREFIX}_prefix_cache_hits", "Tokens the cache held", labels=["attempt"])
    queries.add_metric(["first"], memory.prefix_queries)
    queries.add_metric(["recompute"], memory.recompute_queries)
    hits.add_metric(["first"], memory.prefix_hits)
    hits.add_metric(["recompute"], memory.recompute_hits)
    yield queries
    yield hits
    tiers = CounterMetricFamily(
        f"{PREFIX}_prefix_tokens_found", "Tokens of first attempts not computed, by where they were", labels=["tier"]
    )
    tiers.add_metric(["device"], memory.prefix_hits - memory.host_hits)
    tiers.add_metric(["host"], memory.host_hits)
    tiers.add_metric(["remote"], memory.remote_hits)
    yield tiers
    yield CounterMetricFamily(f"{PREFIX}_kv_evictions", "Cached blocks given up", memory.evictions)
    swapped = CounterMetricFamily(
        f"{PREFIX}_kv_blocks_swapped",
        "Blocks of preempted requests moved to host and back",
        labels=["direction"],
    )
    swapped.add_metric(["out"], memory.swapped_out)
    swapped.add_metric(["in"], memory.swapped_in)
    yield swapped
    yield CounterMetricFamily(
        f"{PREFIX}_kv_blocks_offloaded", "Cached blocks moved to host memory when they were evicted", memory.offloaded
    )
    yield CounterMetricFamily(
        f"{PREFIX}_kv_blocks_copied", "Shared blocks copied because they were written to", memory.copied
    )
    yield CounterMetricFamily(f"{PREFIX}_out_of_memory", "Times the device had no memory", memory.out_of_memory)


def _runtime(totals: Counters) -> Iterable[Metric]:
    runtime = totals.runtime
    parts = CounterMetricFamily(f"{PREFIX}_step_part_seconds", "Step time by part", labels=["part"])
    for part in ("schedule", "prepare", "launch", "forward", "sync", "sample", "post", "idle"):
        parts.add_metric([part], getattr(runtime, f"{part}_s"))
    yield parts
    yield _histogram("step_seconds", "Time of one engine step", runtime.step_time)


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, histogram: Histogram | None) -> HistogramMetricFamily:
    """Cumulative counts at every half octave; what lies above the last edge is in +Inf only."""
    histogram = histogram or Histogram()
    buckets: list[tuple[str, float]] = []
    indices = sorted(histogram.buckets)
    below, position = histogram.zero, 0
    for edge in range(FIRST_EDGE, LAST_EDGE + 1, EDGE_STEP):
        while position < len(indices) and indices[position] <= edge:
            below += histogram.buckets[indices[position]]
            position += 1
        buckets.append((repr(Histogram.upper_bound(edge)), below))
    buckets.append(("+Inf", histogram.count))
    return HistogramMetricFamily(f"{PREFIX}_{name}", text, buckets=buckets, sum_value=histogram.total)
