"""The gateway's Prometheus metrics.

Layer: service. Label values come from tenants that have authenticated and models that are served; anything else reads
"other", and so do tenants beyond `MAX_TENANTS` and models beyond `MAX_MODELS` (F32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from controlplane.gateway.record import RequestRecord
from controlplane.quotas.schemas import QuotaKind

OTHER = "other"
MAX_TENANTS = 2_000
MAX_MODELS = 200
STATUSES = frozenset({1, 2, 3, 4, 5})
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class _Ended:
    """Requests that ended alike, and their tokens, that are not in the counters yet."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0


class _CaughtUp(Collector):
    """Counters that are brought up to date when they are read: a request costs no look-up and no lock of theirs."""

    def __init__(self, counters: tuple[Counter, ...], catch_up: Callable[[], None]) -> None:
        self._counters = counters
        self._catch_up = catch_up

    def describe(self) -> Iterator[Metric]:
        for counter in self._counters:
            yield from counter.describe()

    def collect(self) -> Iterator[Metric]:
        self._catch_up()
        for counter in self._counters:
            yield from counter.collect()


class GatewayMetrics:
    """Registered in `registry` under `tidegate_gateway_*`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tenants: set[str] = set()
        self._models: set[str] = set()
        self._ended: dict[tuple[str, str, str, str], _Ended] = {}
        """By tenant, model, class of the status and outcome, which are bounded as labels are."""
        self._registry = registry
        self.requests = Counter(
            "tidegate_gateway_requests",
            "Requests on /v1 by tenant, model and status class.",
            ("tenant", "model", "status"),
            registry=None,
        )
        self.outcomes = Counter(
            "tidegate_gateway_outcomes",
            "Inference requests by how they ended.",
            ("tenant", "model", "outcome"),
            registry=None,
        )
        self.tokens = Counter(
            "tidegate_gateway_tokens",
            "Tokens of ended requests, as the engines counted them: prompt, of it cached, and output.",
            ("tenant", "model", "kind"),
            registry=None,
        )
        registry.register(_CaughtUp((self.requests, self.outcomes, self.tokens), self._catch_up))
        self.ttft = Histogram(
            "tidegate_gateway_ttft_seconds",
            "Time from arrival to the first token of streamed requests.",
            ("model",),
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.forged_headers = Counter(
            "tidegate_gateway_forged_headers",
            "Inbound headers that claimed to come from inside and were dropped.",
            registry=registry,
        )
        self.upstream_failures = Counter(
            "tidegate_gateway_upstream_failures",
            "Attempts that a replica gave no answer to, by cause and whether another attempt followed.",
            ("cause", "retried"),
            registry=registry,
        )
        self.quota_refusals = Counter(
            "tidegate_gateway_quota_refusals",
            "Limits that were in a request's way, by kind and the refusal's code.",
            ("kind", "code"),
            registry=registry,
        )
        self.log_lines_dropped = Counter(
            "tidegate_gateway_log_lines_dropped",
            "Lines of the request log that were not written: no room, or a flood without usable keys.",
            registry=registry,
        )

        self.prompts_logged = Counter(
            "tidegate_gateway_prompts_logged",
            "Requests of tenants that asked for it that were delivered to the prompt log.",
            registry=registry,
        )
        self.prompts_dropped = Counter(
            "tidegate_gateway_prompts_dropped",
            "Requests that the prompt log lost: over the rate, no room, or refused by the control plane.",
            registry=registry,
        )

    def observe(
        self,
        *,
        in_flight: Callable[[], float],
        listening: Callable[[], float],
        ready_replicas: Callable[[], float],
    ) -> None:
        """Register the gauges that are read when scraped."""
        Gauge("tidegate_gateway_in_flight", "Requests in flight.", registry=self._registry).set_function(in_flight)
        Gauge(
            "tidegate_gateway_policy_listening",
            "1 while policy changes are heard at once, 0 while cached policy is read again as it ages.",
            registry=self._registry,
        ).set_function(listening)
        Gauge(
            "tidegate_gateway_ready_replicas",
            "Replicas that are READY in this gateway's view of the fleet.",
            registry=self._registry,
        ).set_function(ready_replicas)

    def ended(self, record: RequestRecord) -> None:
        """An inference request has ended."""
        tenant, model = self._tenant(record.tenant), self._model(record.model)
        outcome = record.outcome.value if record.outcome else OTHER
        name = (tenant, model, _class(record.status), outcome)
        ended = self._ended.get(name)
        if ended is None:
            ended = self._ended[name] = _Ended()
        ended.requests += 1
        ended.prompt += record.prompt_tokens
        ended.cached += record.cached_tokens
        ended.output += record.output_tokens
        if record.ttft_s is not None:
            self.ttft.labels(model).observe(record.ttft_s)

    def answered(self, tenant: str, status: int) -> None:
        """A request that is no inference was answered, or one without a usable key refused (tenant "")."""
        self.requests.labels(self._tenant(tenant), OTHER, _class(status)).inc()

    def quota_refused(self, kind: QuotaKind, code: str) -> None:
        """A limit was in the way."""
        self.quota_refusals.labels(kind.value, code).inc()

    def upstream_failed(self, cause: str, *, retried: bool) -> None:
        self.upstream_failures.labels(cause, "yes" if retried else "no").inc()

    def _catch_up(self) -> None:
        """Into the counters with what ended since the last time."""
        ended, self._ended = self._ended, {}
        for (tenant, model, status, outcome), one in ended.items():
            self.requests.labels(tenant, model, status).inc(one.requests)
            self.outcomes.labels(tenant, model, outcome).inc(one.requests)
            for kind, tokens in (("prompt", one.prompt), ("cached", one.cached), ("output", one.output)):
                if one.prompt or one.output:
                    self.tokens.labels(tenant, model, kind).inc(tokens)

    def _tenant(self, slug: str) -> str:
        return _bounded(self._tenants, slug, MAX_TENANTS)

    def _model(self, name: str) -> str:
        return _bounded(self._models, name, MAX_MODELS)


def _bounded(known: set[str], name: str, most: int) -> str:
    """`name` if it has a series or there is room for one more, else "other"."""
    if name in known:
        return name
    if not name or len(known) >= most:
        return OTHER
    known.add(name)
    return name


def _class(status: int) -> str:
    """A replica may answer with any number."""
    return f"{status // 100}xx" if status // 100 in STATUSES else OTHER
