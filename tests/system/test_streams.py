"""Many streams at once, clients that leave, and a key that is revoked (F16): afterwards every block is free."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from openai import AsyncOpenAI

from controlplane.local.display import DEMO_QUESTION
from tests.controlplane.local.processes import wait_until
from tests.system.product import Product, chat, session


def quiet(product: Product, since: float) -> bool:
    """A report that came after `since` says: nothing runs or waits, and every KV block is free or only cached."""
    replica = product.replica()
    gauges, age = replica["gauges"], replica["age_s"]
    return (
        gauges is not None
        and time.monotonic() - age > since
        and gauges.get("running", 0) == 0
        and gauges.get("waiting", 0) == 0
        and gauges.get("blocks_used", 0) == 0
        and gauges["blocks_free"] == gauges["blocks_total"]
    )


async def test_32_concurrent_streams_all_finish_and_free_every_block(product: Product) -> None:
    async with session(product, product.demo_key) as client:
        answers = await asyncio.gather(
            *(
                chat(client, product, f"Count from {n} to {n + 20}, one number a line.", max_tokens=12, seed=n)
                for n in range(32)
            )
        )
    assert [answer.status for answer in answers] == [200] * 32
    assert all(answer.done and answer.error is None for answer in answers)
    assert all(0 < answer.usage["completion_tokens"] <= 12 for answer in answers)
    ended = time.monotonic()
    assert await asyncio.to_thread(wait_until, lambda: quiet(product, ended)), product.replica()["gauges"]


async def test_the_openai_client_works_unchanged(product: Product) -> None:
    async with AsyncOpenAI(base_url=f"{product.gateway_url}/v1", api_key=product.demo_key, max_retries=0) as client:
        models = [model.id async for model in client.models.list()]
        assert models == [product.model]
        answer = await client.chat.completions.create(
            model=product.model,
            messages=[{"role": "user", "content": DEMO_QUESTION}],
            temperature=0,
            max_tokens=24,
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        text = ""
        stream = await client.chat.completions.create(
            model=product.model,
            messages=[{"role": "user", "content": DEMO_QUESTION}],
            temperature=0,
            max_tokens=24,
            stream=True,
        )
        async for chunk in stream:
            assert chunk.usage is None, "usage was not asked for"
            text += chunk.choices[0].delta.content or ""
        assert text == answer.choices[0].message.content
        completion = await client.completions.create(model=product.model, prompt="The sea is", max_tokens=5)
        assert completion.choices[0].text


async def test_a_client_that_leaves_frees_its_blocks_at_once(product: Product) -> None:
    key, _ = product.tenant_with_key("leavers")
    async with session(product, key) as client:
        started = [asyncio.Event() for _ in range(4)]
        leaving = [
            asyncio.create_task(
                chat(client, product, f"Tell a very long story, number {n}.", max_tokens=2000, started=event)
            )
            for n, event in enumerate(started)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
    left = time.monotonic()

    def outcomes() -> list[str]:
        return [line["outcome"] for line in product.request_log() if line["tenant"] == "leavers"]

    def usage() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = product.admin("GET", "/usage?tenant=leavers")["items"]
        return items

    assert await asyncio.to_thread(wait_until, lambda: len(outcomes()) == 4), outcomes()
    assert outcomes() == ["cancelled"] * 4
    assert await asyncio.to_thread(wait_until, lambda: len(usage()) == 4), usage()
    assert await asyncio.to_thread(wait_until, lambda: quiet(product, left)), product.replica()["gauges"]
    for line in usage():
        assert line["finish"] == "abort"
        assert line["basis"] == "engine"
        assert line["prompt_tokens"] > 0
        assert 0 < line["output_tokens"] < 2000, "what the engine produced until then, no more and no less"


async def test_a_revoked_key_is_refused_within_two_seconds(product: Product) -> None:
    key, key_id = product.tenant_with_key("revoked")
    body = {"model": product.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    assert product.as_tenant("POST", "/v1/chat/completions", body, key=key).status == 200
    product.admin("DELETE", f"/keys/{key_id}")
    begin = time.monotonic()
    assert await asyncio.to_thread(
        wait_until, lambda: product.as_tenant("GET", "/v1/models", key=key).status == 401, 2.0
    )
    took = time.monotonic() - begin
    refused = product.as_tenant("POST", "/v1/chat/completions", body, key=key)
    assert refused.status == 401
    assert refused.error_code == "api_key_revoked"
    assert took <= 2.0
