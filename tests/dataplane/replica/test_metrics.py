"""/metrics: exact at every bucket edge, honest above the last one, and silent about tenants."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dataplane.config import EngineConfig
from dataplane.engine import EngineCore
from dataplane.metrics import registry_of
from dataplane.protocol import CoreStats, Counters, EngineRequest, Gauges, Histogram, SamplingParams, TenantService
from dataplane.replica import Replica
from tests.dataplane.replica.harness import make_config, scripted, smollm2_tokenizer
from tests.factories.models import tiny_config, write_safetensors

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


def serve(core: EngineCore, *requests: EngineRequest) -> None:
    for request in requests:
        core.add(request)
    while core.has_work():
        core.step()


def request(name: str, prompt: list[int], max_tokens: int, forks: tuple[str, ...] = ()) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, arrived_at=0.0, forks=forks)


def test_what_the_host_tier_does_is_told(tmp_path: Path) -> None:
    """A real core with nine blocks of 16 and twelve in host memory."""
    options = {"num_blocks": 10, "max_model_len": 128, "host_blocks": 12, "preemption": "swap", "watermark": 0.0}
    core = EngineCore(EngineConfig.resolve(write_safetensors(tmp_path / "tiny", tiny_config()), threads=1, **options))
    own = Replica(make_config(tmp_path, scripted()), smollm2_tokenizer())
    one, filler = [3 + index for index in range(33)], [60 + index % 40 for index in range(120)]
    serve(core, request("a", one, 1))
    # Eight blocks: they leave the first block of the prompt on the device, and its second goes to host memory.
    serve(core, request("b", filler, 1))
    serve(core, request("c", one, 4, ("c1", "c2")))
    own._take_stats(1, core.stats())
    text = scrape(own)
    assert samples(text, "tidegate_engine_prefix_cache_hits_total") == {"first": 32, "recompute": 0}
    assert samples(text, "tidegate_engine_prefix_tokens_found_total") == {"device": 16, "host": 16, "remote": 0}
    assert samples(text, "tidegate_engine_kv_blocks_copied_total") == {"": 2}
    memory = core.stats().counters.memory
    assert memory.offloaded > 1
    assert samples(text, "tidegate_engine_kv_blocks_offloaded_total") == {"": memory.offloaded}
    assert samples(text, "tidegate_engine_kv_blocks_swapped_total") == {"out": 0, "in": 0}
    # Two sequences of six blocks: one of them leaves with four, and finds three of those still on the device.
    serve(core, request("d", one[::-1], 60), request("e", [*one[5:], *one[:5]], 60))
    own._take_stats(1, core.stats())
    text = scrape(own)
    assert samples(text, "tidegate_engine_kv_blocks_swapped_total") == {"out": 4, "in": 1}
    assert samples(text, "tidegate_engine_host_kv_blocks") == {"total": 12, "used": 0}


def test_what_is_loaded_from_elsewhere_is_told(tmp_path: Path) -> None:
    own = Replica(make_config(tmp_path, scripted()), smollm2_tokenizer())
    counters = Counters()
    counters.memory.prefix_hits, counters.memory.host_hits, counters.memory.remote_hits = 50, 20, 30
    own._take_stats(1, CoreStats(counters=counters, gauges=Gauges(waiting_for_remote_kv=3, host_blocks_used=2)))
    text = scrape(own)
    assert samples(text, "tidegate_engine_prefix_tokens_found_total") == {"device": 30, "host": 20, "remote": 30}
    assert samples(text, "tidegate_engine_requests_waiting_for_remote_kv") == {"": 3}
    assert samples(text, "tidegate_engine_host_kv_blocks") == {"total": 0, "used": 2}
