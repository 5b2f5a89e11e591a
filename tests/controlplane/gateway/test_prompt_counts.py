"""When a prompt is counted before it is judged, and when its bytes say enough."""

from __future__ import annotations

import asyncio
import time

import pytest

from controlplane.gateway.counting import MOST_OF_ONE
from controlplane.quotas.schemas import QuotaKind, Raise
from controlplane.settings import Settings
from tests.controlplane.gateway.harness import CHAT, check_error, route, running_gateway
from tests.controlplane.gateway.metered import (
    ASK,
    RPM,
    TPM,
    USED,
    all_settled,
    answer_of,
    limit,
    used,
)
from tests.controlplane.gateway.replicas import fake_replica


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (QuotaKind.MAX_OUTPUT_TOKENS, ASK, "max_completion_tokens"),
        (QuotaKind.MAX_OUTPUT_TOKENS, CHAT, "max_completion_tokens"),
        (QuotaKind.MAX_PROMPT_TOKENS, {**CHAT, "messages": [{"role": "user", "content": "x" * 99}]}, "messages"),
        (QuotaKind.MAX_PROMPT_TOKENS, {"model": "m", "prompt": "x" * 99}, "prompt"),
        (QuotaKind.MAX_PROMPT_TOKENS, {"model": "m", "prompt": list(range(99))}, "prompt"),
    ],
)
async def test_a_prompt_or_answer_that_is_too_long_is_refused_by_name(
    own: Settings, kind: QuotaKind, body: dict[str, object], param: str
) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(kind, 98),)) as served,
    ):
        async with served.post(body, path=path) as response:
            assert response.status == 400
            detail = check_error(await response.json(), f"{kind.value}_exceeded")
            assert detail["param"] == param
            assert "98" in str(detail["message"])
            assert f"limit={kind.value}; scope=tenant" in response.headers["x-tidegate-reason"]
        assert not replica.seen
        assert (await answer_of(served, {"model": "m", "prompt": [1] * 98, "max_tokens": 98}, path="/v1/completions"))[
            0
        ] == 200


@pytest.mark.parametrize(("tokens", "status"), [(98, 200), (99, 400), (None, 400)])
async def test_a_prompt_is_counted_where_its_bytes_are_too_many(own: Settings, tokens: int | None, status: int) -> None:
    limits = (limit(QuotaKind.MAX_PROMPT_TOKENS, 98, soft=97),)
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=limits) as served:
        replica.tokens = tokens
        async with served.post({**ASK, "messages": [{"role": "user", "content": "word " * 100}]}) as response:
            assert response.status == status
            body = await response.json()
            if status == 400:
                message = str(check_error(body, "max_prompt_tokens_exceeded")["message"])
                assert ("has 99 tokens" if tokens else "(one a byte)") in message
            else:
                assert response.headers["x-tidegate-quota-warning"].endswith("used=98; soft=97")
        assert [one.path for one in replica.counted] == ["/v1/chat/completions/tokens"]
        assert "x-tidegate-tenant" not in replica.counted[0].headers
        assert len(replica.seen) == (status == 200)


async def test_a_prompt_is_counted_also_where_only_a_raise_lets_it_pass(own: Settings) -> None:
    raised = Raise(amount=1000, starts_at=time.time() - 60, expires_at=time.time() + 3600)
    limits = (limit(QuotaKind.MAX_PROMPT_TOKENS, 1, raises=(raised,)),)
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=limits) as served:
        replica.tokens = 400
        long = {**ASK, "messages": [{"role": "user", "content": "x" * 1500}]}
        assert (await answer_of(served, long))[:2] == (200, "")
        assert len(replica.counted) == 1


async def test_a_prompt_that_is_surely_short_or_hopelessly_long_is_not_counted(own: Settings) -> None:
    limits = (limit(QuotaKind.MAX_PROMPT_TOKENS, 300),)
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=limits) as served:
        replica.tokens = 1
        assert (await answer_of(served, ASK))[0] == 200
        long = {**ASK, "messages": [{"role": "user", "content": "x" * 50_000}]}
        assert (await answer_of(served, long))[1] == "max_prompt_tokens_exceeded"
        ids = {"model": "m", "prompt": [1] * 301}
        assert (await answer_of(served, ids, path="/v1/completions"))[1] == "max_prompt_tokens_exceeded"
        assert not replica.counted


async def test_a_rate_limit_that_the_bytes_would_pass_is_asked_with_the_counted_prompt(own: Settings) -> None:
    tokens = limit(TPM, 1000)
    long = {**ASK, "messages": [{"role": "user", "content": "x" * 3000}]}
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=(tokens,)) as served:
        replica.tokens = 700
        status, _, response = await answer_of(served, long)
        assert status == 200
        assert response.headers["x-ratelimit-remaining-tokens"] == str(1000 - 700 - 100)
        await all_settled(served)
        assert await used(served, tokens) == USED
        replica.tokens = 901  # and 100 of output
        _, code, response = await answer_of(served, long)
        assert code == "tokens_per_minute_exceeded"
        assert response.headers["x-should-retry"] == "false"
        assert (len(replica.counted), len(replica.seen)) == (2, 1)


async def test_one_tenant_has_few_prompts_counted_at_once(own: Settings) -> None:
    """The others of the flood are refused by their bytes, at once."""
    long = {**ASK, "messages": [{"role": "user", "content": "x" * 3000}]}
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(TPM, 1000),)) as served,
    ):
        counting = asyncio.Event()

        async def slow(*_: object) -> int:
            await counting.wait()
            return 1001

        replica.tokens = 1001
        assert served.gateway._counter is not None
        served.gateway._counter._ask = slow  # type: ignore[method-assign]
        asked = [asyncio.create_task(answer_of(served, long)) for _ in range(12)]
        async with asyncio.timeout(20):
            while sum(task.done() for task in asked) < 12 - MOST_OF_ONE:
                await asyncio.sleep(0.01)
        assert sum(task.done() for task in asked) == 12 - MOST_OF_ONE
        counting.set()
        assert {code for _, code, _ in await asyncio.gather(*asked)} == {"tokens_per_minute_exceeded"}
        assert not served.gateway._counter._asking


async def test_where_nothing_is_left_nobody_counts(own: Settings) -> None:
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(TPM, 1000), limit(RPM, 1))) as served,
    ):
        replica.tokens = 5
        assert (await answer_of(served, ASK))[0] == 200
        long = {**ASK, "messages": [{"role": "user", "content": "x" * 3000}]}
        assert (await answer_of(served, long))[0] == 429
        assert not replica.counted
