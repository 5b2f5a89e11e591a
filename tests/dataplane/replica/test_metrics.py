"""/metrics: exact at every bucket edge, honest above the last one, and silent about tenants."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dataplane.metrics import registry_of
from dataplane.protocol import Counters, Histogram, TenantService
from dataplane.replica import Replica
from tests.dataplane.replica.harness import make_config, scripted, smollm2_tokenizer

TTFT = "tidegate_engine_time_to_first_token_seconds"


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Replica:
    """Its clock stands still: all is counted in one window."""
    config = make_config(tmp_path_factory.mktemp("home"), scripted())
    return Replica(config, smollm2_tokenizer(), wall=lambda: 1_700_000_000.0)


def scrape(replica: Replica) -> str:
    return generate_latest(registry_of(replica)).decode()


def samples(text: str, name: str) -> dict[str, float]:
    """Value by the one label of a metric's samples, by "" without labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                found["".join(sample.labels.values())] = sample.value
    return found


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.0, 10_000.0), max_size=30))
def test_f27_bucket_counts_are_exact_and_what_is_above_is_only_in_infinity(
    replica: Replica, values: list[float]
) -> None:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    replica.book.counters(replica.wall()).service.ttft = histogram
    text = scrape(replica)
    buckets = samples(text, f"{TTFT}_bucket")
    assert len(buckets) > 30
    for edge, count in buckets.items():
        assert count == sum(value <= float(edge) for value in values)
    assert buckets["+Inf"] == samples(text, f"{TTFT}_count")[""] == len(values)
    assert samples(text, f"{TTFT}_sum")[""] == pytest.approx(math.fsum(values))


def test_f32_no_tenant_appears(tmp_path: Path) -> None:
    own = Replica(make_config(tmp_path, scripted()), smollm2_tokenizer())
    counters: Counters = own.book.counters(own.wall())
    counters.scheduling.tenants["canary-tenant"] = TenantService(prompt_tokens=5)
    assert "canary-tenant" not in scrape(own)


def test_every_name_has_the_engines_prefix_and_one_state_is_on(replica: Replica) -> None:
    text = scrape(replica)
    families = list(text_string_to_metric_families(text))
    assert len(families) > 25
    assert all(family.name.startswith("tidegate_engine") for family in families)
    assert all(family.documentation for family in families)
    assert samples(text, "tidegate_engine_state") == {"starting": 1.0, "ready": 0.0, "draining": 0.0, "failed": 0.0}
