"""/v1 through the real server: what OpenAI clients see, and what replicas are told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import msgspec
import openai
import pytest
from prometheus_client import generate_latest

from controlplane.settings import Settings
from dataplane.protocol import ReplicaState
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.harness import Running, route, running_gateway
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

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with fake_replica() as running:
        yield running


@pytest.fixture
async def served(offline_settings: Settings, replica: FakeReplica) -> AsyncIterator[Running]:
    async with running_gateway(offline_settings, route(replica, "r0"), models=("m", "other")) as running:
        yield running


def check_error(body: dict[str, object], code: str) -> dict[str, object]:
    """The OpenAI error shape, with this code."""
    assert list(body) == ["error"]
    detail = body["error"]
    assert isinstance(detail, dict)
    assert set(detail) == {"message", "type", "param", "code"}
    assert detail["code"] == code
    assert detail["message"]
    return detail


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


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, "missing_api_key"),
        ("", "invalid_api_key"),
        ("Bearer", "invalid_api_key"),
        ("Bearer ", "invalid_api_key"),
        ("Basic abc", "invalid_api_key"),
        ("Bearer tg_short", "invalid_api_key"),
        ("Bearer " + "é" * 20, "invalid_api_key"),
        ("Bearer " + "x" * 5000, "invalid_api_key"),
    ],
)
async def test_a_request_without_a_usable_key_gets_401_and_reads_nothing(
    served: Running, replica: FakeReplica, authorization: str | None, code: str
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    async with served.client.post(served.url + "/v1/chat/completions", data=b"not json", headers=headers) as response:
        assert response.status == 401
        assert response.headers["www-authenticate"] == "Bearer"
        check_error(await response.json(), code)
    assert served.policy.reads == 0
    assert not replica.seen
    assert served.counters()[("(no usable key)", "", "")].refused == {code: 1}
    assert served.total().accepted == 0


async def test_two_authorization_headers_are_no_identity(served: Running) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {served.key}\r\n" * 1
    writer.write((head + f"authorization: Bearer {served.policy.key()}\r\nconnection: close\r\n\r\n").encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_unknown_revoked_expired_and_inactive_keys(served: Running, replica: FakeReplica) -> None:
    unknown = served.policy.key()
    del served.policy.grants[unknown.split("_")[1]]
    stolen = served.policy.key()
    served.policy.change(stolen, secret_hash=b"x" * 32)
    cases = [
        (unknown, 401, "invalid_api_key"),
        (stolen, 401, "invalid_api_key"),
        (served.policy.key(revoked=True), 401, "api_key_revoked"),
        (served.policy.key(expires_at=time.time() - 1), 401, "api_key_expired"),
        (served.policy.key(tenant_active=False), 403, "tenant_inactive"),
    ]
    for key, status, code in cases:
        async with served.post(CHAT, key=key) as response:
            text = await response.text()
            assert response.status == status
            check_error(json.loads(text), code)
            assert key not in text
    async with served.post(CHAT, key=served.policy.key(expires_at=time.time() + 60)) as response:
        assert response.status == 200
    assert len(replica.seen) == 1


async def test_a_key_with_a_list_of_models_gets_no_other_and_learns_nothing_of_others(served: Running) -> None:
    key = served.policy.key(allowed_models=("other", "gone"))
    answers = []
    for model in ("m", "does-not-exist"):
        async with served.post({**CHAT, "model": model}, key=key) as response:
            detail = check_error(await response.json(), "model_not_allowed")
            answers.append((response.status, str(detail["message"]).replace(repr(model), "?")))
    assert answers == [(403, "This API key may not use the model ?.")] * 2
    async with served.post({**CHAT, "model": "gone"}, key=key) as response:
        assert response.status == 404
        check_error(await response.json(), "model_not_found")
    headers = {"authorization": f"Bearer {key}"}
    async with served.client.get(served.url + "/v1/models", headers=headers) as response:
        listed = await response.json()
    assert listed == {
        "object": "list",
        "data": [{"id": "other", "object": "model", "created": 1000, "owned_by": "tidegate"}],
    }
    async with served.client.get(served.url + "/v1/models/m", headers=headers) as response:
        assert response.status == 404
        check_error(await response.json(), "model_not_found")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "empty_body"),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"{}", 400, "missing_model"),
        (b'{"model":3}', 400, "invalid_model"),
        (b'{"model":"nope"}', 404, "model_not_found"),
        (b'{"model":"m","model":"other"}', 400, "duplicate_key"),
        (b'{"model":"' + b"x" * 10_000 + b'"}', 404, "model_not_found"),
    ],
)
async def test_bad_bodies_get_an_openai_error_and_reach_no_replica(
    served: Running, replica: FakeReplica, body: bytes, status: int, code: str
) -> None:
    async with served.post(body) as response:
        assert response.status == status
        detail = check_error(await response.json(), code)
        assert len(str(detail["message"])) < 300
    assert not replica.seen
    total = served.total()
    assert (total.accepted, total.refused) == (1, {code: 1})


async def test_a_body_over_the_limit_is_refused_with_413_whole_or_chunked(
    served: Running, replica: FakeReplica
) -> None:
    limit = served.gateway.settings.max_body_bytes

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 65536

    async with served.post(b" " * (limit + 1)) as response:
        assert response.status == 413
        check_error(await response.json(), "request_too_large")
    async with served.client.post(
        served.url + "/v1/chat/completions", data=pieces(), headers={"authorization": f"Bearer {served.key}"}
    ) as response:
        assert response.status == 413
    padded = json.dumps(CHAT).encode()
    async with served.post(padded + b" " * (limit - len(padded))) as response:
        assert response.status == 200
    assert len(replica.seen) == 1
    assert served.gateway.in_flight == 0


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1", 404, "unknown_url"),
        ("GET", "/v1/chat", 404, "unknown_url"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
    ],
)
async def test_other_paths_and_methods_get_an_openai_error(
    served: Running, method: str, path: str, status: int, code: str
) -> None:
    headers = {"authorization": f"Bearer {served.key}"}
    async with served.client.request(method, served.url + path, headers=headers) as response:
        assert response.status == status
        check_error(await response.json(), code)
        assert (status == 405) == ("allow" in response.headers)


async def test_a_compressed_body_is_refused(served: Running) -> None:
    async with served.post(b"\x1f\x8b", headers={"content-encoding": "gzip"}) as response:
        assert response.status == 415
        check_error(await response.json(), "unsupported_content_encoding")


async def test_what_the_replica_refuses_is_relayed_in_its_own_words(served: Running, replica: FakeReplica) -> None:
    refusal = {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "m",
            "code": "context_length_exceeded",
        }
    }
    replica.behave = replicas.error(400, refusal)
    async with served.post(STREAM) as response:
        assert response.status == 400
        assert await response.json() == refusal
    total = served.total()
    assert (total.accepted, total.refused) == (1, {"context_length_exceeded": 1})
    assert served.gateway.board.candidates([route(replica, "r0")])[0].suspect is False


async def test_f18_client_errors_never_count_against_the_replica(served: Running, replica: FakeReplica) -> None:
    replica.behave = replicas.error(422, {"detail": "not OpenAI's shape"})
    for _ in range(20):
        async with served.post(CHAT) as response:
            assert response.status == 422
            check_error(await response.json(), "upstream_422")
    assert served.gateway.board.candidates([route(replica, "r0")])[0].suspect is False
    assert served.total().refused == {"upstream_422": 20}


@pytest.mark.parametrize("status", [401, 403, 302])
async def test_what_concerns_only_gateway_and_replica_never_reaches_the_client(
    served: Running, replica: FakeReplica, status: int
) -> None:
    body = {"error": {"message": "bad internal token", "type": "x", "param": None, "code": "y"}}
    replica.behave = replicas.error(status, body, {"location": "http://10.0.0.1/"} if status == 302 else None)
    async with served.post(CHAT, allow_redirects=False) as response:
        text = await response.text()
        assert response.status == 502
        check_error(json.loads(text), "upstream_protocol")
        assert "internal token" not in text
    assert served.total().failed == {"upstream_protocol": 1}


async def test_a_replica_without_capacity_says_when_to_come_back(served: Running, replica: FakeReplica) -> None:
    body = {"error": {"message": "starting", "type": "server_error", "param": None, "code": "core_starting"}}
    replica.behave = replicas.error(503, body, {"retry-after": "7"})
    async with served.post(CHAT) as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "7"
        assert "replica_unavailable" in response.headers["x-tidegate-reason"]
        assert await response.json() == body


async def test_no_replica_is_503_with_retry_after_and_a_reason(offline_settings: Settings) -> None:
    gone = route("http://127.0.0.1:9", "r0", ReplicaState.DRAINING)
    async with running_gateway(offline_settings, gone) as served, served.post(CHAT) as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers["x-tidegate-reason"].startswith("no_capacity; layer=")
        check_error(await response.json(), "no_capacity")
        assert served.total().refused == {"no_capacity": 1}


async def test_in_flight_is_bounded_and_one_more_is_refused_at_once(offline_settings: Settings) -> None:
    settings = msgspec.structs.replace(offline_settings, max_in_flight=2)
    async with (
        fake_replica(replicas.stream_forever) as replica,
        running_gateway(settings, route(replica, "r0")) as served,
    ):
        async with served.post(STREAM) as first, served.post(STREAM) as second:
            assert (first.status, second.status) == (200, 200)
            assert served.gateway.in_flight == 2
            async with served.post(CHAT) as third:
                assert third.status == 503
                assert third.headers["retry-after"]
                check_error(await third.json(), "too_many_in_flight")
        await served.settled(3)
        assert served.gateway.in_flight == 0


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
