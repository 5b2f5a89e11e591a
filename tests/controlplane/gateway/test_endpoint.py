"""/v1 through the real server: what clients get, what replicas are told, what is counted."""

from __future__ import annotations

import json
import time

import openai
import pytest
from prometheus_client import generate_latest

from controlplane.settings import Settings
from tests.controlplane.gateway.harness import CHAT, STREAM, Running, route, running_gateway
from tests.controlplane.gateway.replicas import (
    ANSWER,
    COMPLETION,
    DONE,
    FakeReplica,
    chunk,
    event,
    fake_replica,
    parts,
    usage_chunk,
)


async def test_a_whole_answer_is_relayed_unchanged(served: Running, replica: FakeReplica) -> None:
    body = b'{ "model":"m",  "messages":[{"role":"user","content":"h\\u00e9"}], "unknown_field": 1.50 }'
    async with served.post(body) as response:
        assert response.status == 200
        assert await response.json() == COMPLETION
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"]
    assert replica.seen[0].body == body
    assert replica.seen[0].path == "/v1/chat/completions"


async def test_a_stream_is_relayed_unchanged_without_the_injected_usage(served: Running, replica: FakeReplica) -> None:
    async with served.post(STREAM) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert await response.read() == b"".join(event(data) for data in ANSWER) + DONE
    sent = json.loads(replica.seen[0].body)
    assert sent == {**STREAM, "stream_options": {"include_usage": True}}
    assert replica.seen[0].headers["x-tidegate-usage"] == "hidden"


async def test_a_client_that_asks_for_usage_gets_it(served: Running, replica: FakeReplica) -> None:
    async with served.post({**STREAM, "stream_options": {"include_usage": True}}) as response:
        assert (await response.read()).endswith(event(usage_chunk()) + DONE)
    assert "x-tidegate-usage" not in replica.seen[0].headers


async def test_the_openai_client_works_unchanged(served: Running) -> None:
    async with openai.AsyncOpenAI(api_key=served.key, base_url=served.url + "/v1", max_retries=0) as client:
        whole = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == "Héllo 🦀"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 8
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        pieces = [part async for part in stream]
        assert "".join(part.choices[0].delta.content or "" for part in pieces) == "Héllo 🦀"
        assert all(part.usage is None for part in pieces)
        asked = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        last = [part async for part in asked][-1]
        assert last.usage is not None
        assert last.usage.completion_tokens == 3
        assert [model.id async for model in client.models.list()] == ["m", "other"]
        assert (await client.models.retrieve("m")).created == 1000
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="nope", messages=[])
        assert unknown.value.code == "model_not_found"
    async with openai.AsyncOpenAI(api_key="tg_nonsense", base_url=served.url + "/v1", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_f23_identity_comes_from_the_key_alone_and_forged_headers_are_counted(
    served: Running, replica: FakeReplica
) -> None:
    forged = {
        "x-tidegate-tenant": "victim",
        "X-Tidegate-Salt": "victims-salt",
        "x-tidegate-priority": "-99",
        "x-tidegate-attempt": "forged",
        "x-tidegate-anything": "1",
        "cookie": "secret=1",
        "x-forwarded-for": "10.0.0.1",
    }
    async with served.post(CHAT, headers=forged) as response:
        assert response.status == 200
        assert not [name for name in response.headers if name.lower().startswith("x-tidegate")]
    got = replica.seen[0].headers
    assert got["x-tidegate-tenant"] == "acme"
    assert got["x-tidegate-salt"] == "salt-acme"
    assert got["x-tidegate-priority"] == "0"
    assert got["x-tidegate-attempt"] != "forged"
    assert got["authorization"] == "Bearer internal-token-of-the-tests"
    assert not {"x-tidegate-anything", "cookie", "x-forwarded-for"} & set(got)
    assert served.metric("forged_headers_total") == 5


async def test_the_tenants_priority_goes_to_the_engine_as_it_is(served: Running, replica: FakeReplica) -> None:
    """The engine's queue serves lower numbers first, so that is what an operator's number means."""
    async with served.post(CHAT, key=served.policy.key(tenant="urgent", priority=-7)) as response:
        assert response.status == 200
    assert replica.seen[0].headers["x-tidegate-priority"] == "-7"


async def test_f33_secrets_reach_no_sink(
    served: Running, replica: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "canary-5c1f6e0b"
    body = {"model": canary, "messages": [{"role": "user", "content": canary}]}
    async with served.post({**CHAT, "messages": [{"role": "user", "content": canary}], "user": canary}):
        pass
    async with served.post(body, headers={"x-tidegate-tenant": canary, "x-canary": canary}):
        pass
    async with served.post(b'{"model":"' + canary.encode() + b'"'):
        pass
    log = served.log_path.read_text() if await served.lines() else ""
    assert canary not in log
    assert served.key not in log
    assert served.key.split("_")[2] not in log
    exposed = generate_latest(served.registry).decode()
    assert canary not in exposed
    assert served.key not in exposed
    assert canary not in caplog.text
    assert canary not in str(served.counters())


async def test_usage_and_timings_reach_log_and_counters_alike(served: Running) -> None:
    for body in (CHAT, STREAM, STREAM):
        async with served.post(body) as response:
            await response.read()
    lines = await served.lines()
    total = served.total()
    assert (total.accepted, total.finished) == (3, {"stop": 3})
    assert (total.prompt_tokens, total.cached_tokens, total.output_tokens) == (36, 24, 9)
    assert [line["stream"] for line in lines] == [False, True, True]
    streamed = [line for line in lines if line["stream"]]
    whole = lines[0]
    assert (whole["ttft_s"], whole["tpot_s"], whole["ttft_visible_s"]) == (None, None, None)
    for name, histogram in (("ttft_s", total.ttft), ("ttft_visible_s", total.ttft_visible)):
        assert histogram is not None
        assert histogram.count == 2
        assert histogram.total == pytest.approx(sum(line[name] for line in streamed))
    assert total.e2e is not None
    assert total.e2e.total == pytest.approx(sum(line["e2e_s"] for line in lines))
    for line in lines:
        assert line["outcome"] == "finished"
        assert (line["finish"], line["error_code"], line["status"]) == ("stop", None, 200)
        assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (12, 8, 3)
        assert (line["tenant"], line["model"], line["pool"], line["replica"]) == ("acme", "m", "pool-m", "r0")
        assert line["key_id"] == served.key.split("_")[1]
        assert line["attempt_id"]
    assert served.counters().keys() == {("acme", "pool-m", "r0")}


async def test_f25_ttft_is_the_first_token_not_the_headers(offline_settings: Settings) -> None:
    pieces = [event(chunk("", role="assistant")), event(chunk("a")), event(chunk("b")), event(usage_chunk()), DONE]
    async with (
        fake_replica(parts(pieces, pause=0.1)) as replica,
        running_gateway(offline_settings, route(replica, "r0")) as served,
    ):
        async with served.post(STREAM) as response:
            headers_at = time.monotonic()
            await response.read()
            after_headers = time.monotonic() - headers_at
        line = (await served.lines())[0]
    assert 0.09 <= line["ttft_s"] < line["e2e_s"]
    assert 0 < line["tpot_s"] < after_headers
    assert line["ttft_s"] == line["ttft_visible_s"]


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -5, "completion_tokens": -1},
        {"prompt_tokens": 2**62, "completion_tokens": 2**62},
        {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}},
        {"prompt_tokens": "many"},
        {"prompt_tokens": None, "completion_tokens": None},
    ],
)
async def test_f22_a_backend_that_counts_nonsense_spoils_no_sum(
    served: Running, replica: FakeReplica, usage: dict[str, object]
) -> None:
    replica.behave = parts([event(chunk("a")), event(chunk(finish="who knows")), event(usage_chunk(usage)), DONE])
    async with served.post(STREAM) as response:
        assert (await response.read()).endswith(DONE)
    total = served.total()
    assert total.finished == {"other": 1}
    assert 0 <= total.cached_tokens <= total.prompt_tokens < 2**32
    assert 0 <= total.output_tokens < 2**32
