"""The Overview's figures are those of the gateway's own request log; the client's TTFT lies beside them (F25, F26)."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest

from controlplane.telemetry.histogram import BUCKET_WIDTH
from tests.controlplane.local.processes import wait_until
from tests.system.product import Product, Timed, chat, session

SLUG = "figures"
SUBJECTS = ("the tide", "a lighthouse", "an old map", "the harbour", "a paper boat", "the night ferry")


def prompts(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """24 requests of mixed length: every second one repeats an earlier prompt, every sixth is not streamed."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for number in range(24):
        if number % 2 and asked:
            prompt = rng.choice(asked)[0]
        else:
            sentences = [f"Sentence {n} tells of {rng.choice(SUBJECTS)}." for n in range(rng.randint(1, 12))]
            prompt = f"Story {number}. " + " ".join(sentences)
        asked.append((prompt, {"stream": number % 6 != 5, "max_tokens": rng.randint(2, 10), "temperature": 0}))
    return asked


def nearest_rank(values: list[float], q: float) -> float:
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1]


async def test_overview_equals_the_gateways_request_log(
    product: Product, rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    key, _ = product.tenant_with_key(SLUG)
    asked = prompts(rng)
    room = asyncio.Semaphore(3)

    async with session(product, key) as client:

        async def ask(prompt: str, options: dict[str, Any]) -> Timed:
            async with room:
                return await chat(client, product, prompt, **options)

        answers = await asyncio.gather(*(ask(prompt, options) for prompt, options in asked))
    assert {answer.status for answer in answers} == {200}

    assert wait_until(lambda: len(lines_of(product)) == len(asked))
    lines = lines_of(product)
    figures = await settled_figures(product, len(asked))

    for name in ("ttft", "ttft_visible", "tpot"):
        exact = [line[f"{name}_s"] for line in lines if line[f"{name}_s"] is not None]
        assert figures[name]["n"] == len(exact)
        for label, q in (("p50", 0.50), ("p95", 0.95), ("p99", 0.99)):
            shown, true = figures[name][label]["value"], nearest_rank(exact, q)
            assert true / (1 + BUCKET_WIDTH) <= shown <= true * (1 + BUCKET_WIDTH), (name, label, shown, true)
    streamed = sum(options["stream"] for _, options in asked)
    assert figures["ttft"]["n"] == streamed, "a request that is not streamed has no TTFT"

    prompt_tokens = sum(line["prompt_tokens"] for line in lines)
    cached_tokens = sum(line["cached_tokens"] for line in lines)
    assert cached_tokens > 0
    assert figures["prefix_hit"]["value"] == pytest.approx(cached_tokens / prompt_tokens, rel=1e-12)
    rate = figures["request_rate"]
    assert rate["value"] == pytest.approx(len(lines) / rate["window_s"], rel=1e-12)
    output_tokens = sum(line["output_tokens"] for line in lines)
    assert figures["output_rate"]["value"] * rate["window_s"] == pytest.approx(output_tokens, rel=1e-12)
    assert figures["finished"] == {"length": sum(line["finish"] == "length" for line in lines)} | (
        {"stop": stopped} if (stopped := sum(line["finish"] == "stop" for line in lines)) else {}
    )

    assert_usage_is_the_logs(answers, lines)
    with capsys.disabled():
        print(beside_each_other(answers, lines))


def lines_of(product: Product) -> list[dict[str, Any]]:
    return [line for line in product.request_log() if line["tenant"] == SLUG]


async def settled_figures(product: Product, count: int) -> dict[str, Any]:
    """The tenant's figures once every request's end was reported."""

    def look() -> dict[str, Any] | None:
        tenants = product.admin("GET", "/overview?window_s=3600")["by_tenant"]
        found = next((each["figures"] for each in tenants if each["key"] == SLUG), None)
        return found if found is not None and sum(found["finished"].values()) == count else None

    assert await asyncio.to_thread(wait_until, lambda: look() is not None)
    found = look()
    assert found is not None
    return found


def assert_usage_is_the_logs(answers: list[Timed], lines: list[dict[str, Any]]) -> None:
    logged = {line["request_id"]: line for line in lines}
    for answer in answers:
        line = logged[answer.request_id]
        assert answer.usage["prompt_tokens"] == line["prompt_tokens"]
        assert answer.usage["completion_tokens"] == line["output_tokens"]
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == line["cached_tokens"]


def beside_each_other(answers: list[Timed], lines: list[dict[str, Any]]) -> str:
    """The client's TTFT beside the gateway's, which it can only exceed: by the way there and back."""
    logged = {line["request_id"]: line for line in lines}
    pairs = [
        (answer.first_s, logged[answer.request_id]["ttft_visible_s"])
        for answer in answers
        if answer.first_s is not None
    ]
    gaps = [client - gateway for client, gateway in pairs]
    assert pairs
    assert min(gaps) > 0.0, "no client saw its first text before the gateway did"
    told = [f"TTFT of {len(pairs)} streamed requests, in ms:"]
    for label, values in (
        ("client", [client for client, _ in pairs]),
        ("gateway", [gateway for _, gateway in pairs]),
        ("client - gateway", gaps),
    ):
        quantiles = (f"{name} {nearest_rank(values, q) * 1000:.1f}" for name, q in (("p50", 0.5), ("p95", 0.95)))
        told.append(f"  {label:<16} {'  '.join(quantiles)}")
    return "\n" + "\n".join(told)
