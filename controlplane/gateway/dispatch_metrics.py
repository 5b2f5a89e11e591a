"""What admission and fair dispatch do in this process, for Prometheus.

Layer: service. Labels are served models, bands, and codes from a fixed set (F32); the queues' state is read when
scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.admission.bands import Band

WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
BANDS = {band: band.name.lower() for band in Band}


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """One model's queue: this gateway's requests that wait, by band; slots of the pool in all and taken; whether the
    gateway dispatches on its own; the epoch of the plan in force, 0 for none.
    """

    model: str
    waiting: dict[Band, int]
    slots: int
    taken: int
    away: bool
    epoch: int


class DispatchMetrics(Collector):
    """Registers itself in `registry` under `tidegate_gateway_dispatch_*`; `states` tells the queues."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.states: Callable[[], Iterable[QueueState]] = lambda: ()
        self.admitted = Counter(
            "tidegate_gateway_dispatch_admitted",
            "Requests that got their turn: at once, or after they waited.",
            ("band", "how"),
            registry=registry,
        )
        self.refused = Counter(
            "tidegate_gateway_dispatch_refused",
            "Requests that were refused for want of capacity or time, by code; `shed` waited and made room.",
            ("band", "code"),
            registry=registry,
        )
        self.wait = Histogram(
            "tidegate_gateway_dispatch_wait_seconds",
            "Time that requests stood in line before their turn.",
            ("band",),
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self.ratio = Histogram(
            "tidegate_gateway_dispatch_ttft_ratio",
            "Observed time to first token over the predicted one, of streams whose time was predicted.",
            buckets=RATIO_BUCKETS,
            registry=registry,
        )
        self._at_once = {band: self.admitted.labels(name, "at_once") for band, name in BANDS.items()}
        registry.register(self)

    def went_at_once(self, band: Band) -> None:
        self._at_once[band].inc()

    def went(self, band: Band, waited_s: float) -> None:
        self.admitted.labels(BANDS[band], "waited").inc()
        self.wait.labels(BANDS[band]).observe(waited_s)

    def was_refused(self, band: Band, code: str) -> None:
        self.refused.labels(BANDS[band], code).inc()

    def collect(self) -> Iterator[Metric]:
        waiting = self._gauge("waiting", "Requests of this gateway that wait for their turn.", "model", "band")
        slots = self._gauge("slots", "Requests that the model's replicas hold at once.", "model")
        taken = self._gauge("slots_taken", "Of these, taken, by all gateways.", "model")
        away = self._gauge("alone", "1 while the gateway dispatches on its own because Redis is away.", "model")
        epoch = self._gauge("plan_epoch", "Epoch of the share plan in force, 0 for none.", "model")
        for state in self.states():
            for band, name in BANDS.items():
                waiting.add_metric((state.model, name), state.waiting.get(band, 0))
            slots.add_metric((state.model,), state.slots)
            taken.add_metric((state.model,), state.taken)
            away.add_metric((state.model,), float(state.away))
            epoch.add_metric((state.model,), state.epoch)
        yield from (waiting, slots, taken, away, epoch)

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"tidegate_gateway_dispatch_{name}", text, labels=labels)
