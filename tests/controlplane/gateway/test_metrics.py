"""The gateway's counters, read as a scrape reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.record import Outcome, RequestRecord
from tests.controlplane.gateway.harness import Running


def test_output_counts_whose_prompt_was_not_told() -> None:
    """A backend that tells no usable number of the prompt has written its answer all the same."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    for _ in range(2):
        record = RequestRecord(request_id="r", grant=None, at=0.0, accepted=0.0, model="m", output_tokens=5)
        record.conclude(Outcome.FINISHED, "stop", 200)
        metrics.ended(record)
    labels = {"tenant": "other", "model": "m", "kind": "output"}
    assert registry.get_sample_value("tidegate_gateway_tokens_total", labels) == 10.0
    assert registry.get_sample_value("tidegate_gateway_tokens_total", labels) == 10.0


async def test_a_refusal_outside_of_inference_counts_for_the_tenant_whose_key_it_was(served: Running) -> None:
    for key, tenant in ((served.key, "acme"), ("tg_unknown", "other")):
        async with served.client.get(
            f"{served.url}/v1/models/nope", headers={"authorization": f"Bearer {key}"}
        ) as answer:
            assert answer.status in {401, 404}
        assert served.metric("requests_total", tenant=tenant, model="other", status="4xx") == 1.0
