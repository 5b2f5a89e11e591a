"""The gateway's Prometheus metrics.

Layer: service. Label values come from tenants that have authenticated and models that are served; anything else reads
"other", and so do tenants beyond `MAX_TENANTS` and models beyond `MAX_MODELS` (F32).
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controlplane.gateway.record import RequestRecord
from controlplane.quotas.schemas import QuotaKind

OTHER = "other"
MAX_TENANTS = 2_000
MAX_MODELS = 200
STATUSES = frozenset({1, 2, 3, 4, 5})
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class GatewayMetrics:
    """Registered in `registry` under `tidegate_gateway_*`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tenants: set[str] = set()
        self._models: set[str] = set()
        self._children: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        self._registry = registry
        self.requests = Counter(
            "tidegate_gateway_requests",
            "Requests on /v1 by tenant, model and status class.",
            ("tenant", "model", "status"),
            registry=registry,
        )
        self.outcomes = Counter(
            "tidegate_gateway_outcomes",
            "Inference requests by how they ended.",
            ("tenant", "model", "outcome"),
            registry=registry,
        )
        self.tokens = Counter(
            "tidegate_gateway_tokens",
            "Tokens of ended requests, as the engines counted them: prompt, of it cached, and output.",
            ("tenant", "model", "kind"),
            registry=registry,
        )
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
        self._child(self.requests, tenant, model, _class(record.status)).inc()
        self._child(self.outcomes, tenant, model, outcome).inc()
        if record.prompt_tokens:
            self._child(self.tokens, tenant, model, "prompt").inc(record.prompt_tokens)
            self._child(self.tokens, tenant, model, "cached").inc(record.cached_tokens)
            self._child(self.tokens, tenant, model, "output").inc(record.output_tokens)
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

    def _child(self, counter: Counter, *labels: str) -> Counter:
        """The labelled counter; looking it up in the client library costs more than counting."""
        key = (counter, labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = counter.labels(*labels)
        return child

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
