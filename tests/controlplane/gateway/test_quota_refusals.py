"""What a request is told when a limit stops it, and that waiting as long as it is told is enough."""

from __future__ import annotations

import asyncio
import json
import time

from redis.asyncio import Redis

from controlplane.quotas.schemas import QuotaKind, Raise
from controlplane.settings import Settings
from tests.controlplane.admission.leasing import World
from tests.controlplane.gateway.harness import CHAT, STREAM, check_error, route, running_gateway
from tests.controlplane.gateway.metered import (
    ASK,
    ASK_STREAM,
    CONCURRENT,
    DAY,
    OUT,
    RPM,
    Gate,
    all_settled,
    answer_of,
    limit,
)
from tests.controlplane.gateway.replicas import fake_replica


async def test_f11_a_wait_does_not_count_on_a_raise_that_ends_before_it(own: Settings) -> None:
    now = time.time()
    one = limit(RPM, 1, raises=(Raise(amount=2, starts_at=now - 60, expires_at=now + 40),))
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=(one,)) as served:
        assert (await answer_of(served))[0] == 200
        await asyncio.sleep(2.1)
        assert [(await answer_of(served))[0] for _ in range(2)] == [200, 200]
        status, _, response = await answer_of(served)
        assert status == 429
        # With one a minute the first of the three does not make room: all of them have to be over.
        assert response.headers["retry-after"] == response.headers["x-ratelimit-reset-requests"]


async def test_f11_waiting_as_long_as_a_rate_limit_says_is_long_enough_and_needed(own: Settings, redis: Redis) -> None:
    world = await World(redis).start()
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(RPM, 3),), leases=world.gateway()) as served,
    ):
        for _ in range(3):
            assert (await answer_of(served))[0] == 200
            await all_settled(served)
            await world.advance(7)
        status, code, response = await answer_of(served)
        assert (status, code) == (429, "requests_per_minute_exceeded")
        assert "x-tidegate-retry" not in response.headers
        wait = int(response.headers["retry-after"])
        assert 61 - 21 - 1 <= wait <= 61 - 21 + 1
        await world.advance(wait - 2)
        assert (await answer_of(served))[0] == 429
        await world.advance(2)
        assert (await answer_of(served))[0] == 200


async def test_f11_waiting_until_a_day_is_over_is_long_enough(own: Settings, redis: Redis) -> None:
    world = await World(redis).start()
    limits = (limit(DAY, 400),)
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=limits, leases=world.gateway()) as served,
    ):
        served.policy.ledger = 390  # the store has forgotten the day, the ledger has not
        status, code, response = await answer_of(served)
        assert (status, code) == (429, "tokens_per_day_exceeded")
        assert response.headers["retry-after"] == str(12 * 3600)
        assert "x-tidegate-retry" not in response.headers
        served.policy.ledger = 0
        await world.advance(12 * 3600)
        assert (await answer_of(served))[0] == 200


async def test_a_refusal_names_limit_scope_and_layer(own: Settings) -> None:
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=(limit(RPM, 1),)) as served:
        assert (await answer_of(served))[0] == 200
        async with served.post(ASK) as response:
            detail = check_error(await response.json(), "requests_per_minute_exceeded")
            assert detail["type"] == "rate_limit_error"
            assert "the tenant's limit of 1 requests per minute" in str(detail["message"])
            assert response.headers["x-tidegate-reason"] == (
                "requests_per_minute_exceeded; limit=requests_per_minute; scope=tenant; "
                "quota=q-requests_per_minute; layer=service"
            )
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
        line = (await served.lines())[-1]
        assert (line["outcome"], line["status"], line["error_code"]) == ("refused", 429, "requests_per_minute_exceeded")
        assert served.total().refused == {"requests_per_minute_exceeded": 1}
        labels = {"kind": "requests_per_minute", "code": "requests_per_minute_exceeded"}
        assert served.metric("quota_refusals_total", **labels) == 1
        assert served.metric("lease_answers_total", result="granted") == 1
        assert served.metric("lease_answers_total", result="refused") == 1


async def test_concurrency_is_refused_with_an_estimate_and_freed_at_the_end(own: Settings) -> None:
    gate = Gate()
    async with (
        fake_replica(gate.behave) as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(CONCURRENT, 1),)) as served,
    ):
        first = await served.post(ASK_STREAM)
        status, code, response = await answer_of(served, ASK_STREAM)
        assert (status, code) == (429, "concurrent_requests_exceeded")
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers["x-tidegate-retry"] == "estimate"
        gate.open.set()
        await first.read()
        await all_settled(served)
        assert (await answer_of(served, ASK_STREAM))[0] == 200


async def test_a_request_that_can_never_pass_is_not_told_to_wait(own: Settings) -> None:
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(OUT, 99),)) as served,
    ):
        status, code, response = await answer_of(served)
        assert (status, code) == (429, "output_tokens_per_minute_exceeded")
        assert "retry-after" not in response.headers
        assert response.headers["x-should-retry"] == "false"
        said = (await response.json())["error"]["message"]
        assert "could use 100 output tokens, more than the tenant's limit of 99 output tokens per minute" in said
        assert (await answer_of(served, {**CHAT, "max_tokens": 99}))[0] == 200
        assert (await answer_of(served, CHAT))[0] == 429  # it might fill the whole context
        assert len(replica.seen) == 1


async def test_a_limit_of_nothing_does_not_ask_for_fewer_tokens(own: Settings) -> None:
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=(limit(OUT, 0),)) as served:
        status, _, response = await answer_of(served)
        said = (await response.json())["error"]["message"]
        assert status == 429
        assert said.startswith("The tenant's limit of 0 output tokens per minute lets no request through")
        assert "max_tokens" not in said


async def test_above_a_soft_limit_a_request_passes_with_a_warning(own: Settings) -> None:
    limits = (limit(RPM, None, soft=1), limit(QuotaKind.MAX_OUTPUT_TOKENS, None, soft=50))
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=limits) as served:
        for number in (1, 2):
            status, _, response = await answer_of(served, ASK_STREAM)
            assert status == 200
            said = response.headers.getall("x-tidegate-quota-warning")
            assert "max_output_tokens; scope=tenant; used=100; soft=50" in said
            assert ("requests_per_minute; scope=tenant; used=2; soft=1" in said) == (number == 2)


async def test_bodies_that_hide_a_second_limit_are_refused(own: Settings) -> None:
    bodies = [
        b'{"model":"m","messages":[],"max_tokens":1,"max_tokens":9}',
        b'{"n":1,"model":"m","messages":[],"n":9}',
        b'{"model":"m","prompt":"a","best_of":1,"best_\\u006ff":9}',
    ]
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0")) as served:
        for body in bodies:
            async with served.post(body) as response:
                check_error(await response.json(), "duplicate_key")
        async with served.post(
            json.dumps({**STREAM, "n": 1, "user": '"n"', "metadata": {"n": 2}}).encode()
        ) as response:
            assert response.status == 200
        assert len(replica.seen) == 1
