"""Everything /v1 refuses, in OpenAI's shape, and how little a refusal costs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from controlplane.settings import Settings
from dataplane.protocol import ReplicaState
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.harness import CHAT, STREAM, Running, check_error, head_of, route, running_gateway
from tests.controlplane.gateway.replicas import (
    FakeReplica,
    fake_replica,
)


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
    (line,) = await served.lines()
    assert (line["tenant"], line["key_id"], line["status"], line["outcome"]) == ("", "", 401, "refused")
    assert line["error_code"] == code
    assert served.metric("outcomes_total", tenant="other", model="other", outcome="refused") == 1


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
        (served.policy.key(project_active=False), 403, "project_inactive"),
        (served.policy.key(principal_active=False), 403, "principal_inactive"),
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
    lines = await served.lines()
    assert [line["status"] for line in lines] == [status for _, status, _ in cases] + [200]
    assert [line["error_code"] for line in lines] == [code for _, _, code in cases] + [None]
    assert served.total().accepted == 1


async def test_a_key_without_the_scope_inference_is_refused_before_its_body_and_counts_for_its_tenant(
    served: Running, replica: FakeReplica
) -> None:
    for scopes in ((), ("quota:read", "quota:request", "usage:read", "admin")):
        key = served.policy.key(scopes=scopes)
        for path in ("/v1/chat/completions", "/v1/completions"):
            async with served.post(b"not json", key=key, path=path) as response:
                assert response.status == 403
                assert "'inference'" in str(check_error(await response.json(), "scope_missing")["message"])
        async with served.client.get(served.url + "/v1/models", headers={"authorization": f"Bearer {key}"}) as response:
            assert response.status == 200
    async with served.post(CHAT, key=served.policy.key(scopes=("inference",))) as response:
        assert response.status == 200
    assert len(replica.seen) == 1
    lines = await served.lines()
    assert [(line["tenant"], line["error_code"]) for line in lines[:4]] == [("acme", "scope_missing")] * 4


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
    total = served.total()
    assert (total.accepted, total.refused) == (0, {"model_not_allowed": 2, "model_not_found": 1})
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
    assert (total.accepted, total.refused) == (0, {code: 1})


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
    async with served.post(b" " * (limit * 3), key="tg_unknown") as response:
        assert response.status == 401  # and not a broken pipe
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
    assert (total.accepted, total.refused) == (0, {"context_length_exceeded": 1})
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


async def test_while_a_replica_starts_the_wait_is_what_its_start_may_still_take(
    offline_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = route("http://127.0.0.1:9", "r0", ReplicaState.STARTING)
    async with running_gateway(offline_settings, starting) as served:
        seen = time.monotonic()
        monkeypatch.setattr(served.gateway.fleet, "_clock", lambda: seen + 20.0)
        async with served.post(CHAT) as response:
            check_error(await response.json(), "no_capacity")
            assert 20 <= int(response.headers["retry-after"]) <= 40


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


async def test_the_place_kept_for_a_refused_request_is_not_given_to_another_of_its_key(
    offline_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.admission.retry.GRACE_S", 60.0)
    settings = msgspec.structs.replace(offline_settings, max_in_flight=4)
    async with (
        fake_replica(replicas.stream_forever) as replica,
        running_gateway(settings, route(replica, "r0")) as served,
        AsyncExitStack() as held,
    ):
        leaving = await held.enter_async_context(served.post(STREAM))
        for _ in range(3):
            await held.enter_async_context(served.post(STREAM))
        async with served.post(STREAM) as refused:
            assert refused.status == 503
            wait_s = int(refused.headers["retry-after"])
        leaving.close()
        await served.settled(2)
        await asyncio.sleep(wait_s)
        async with served.post(STREAM | {"user": "another"}) as other:
            assert other.status == 503
            check_error(await other.json(), "too_many_in_flight")
        async with served.post(STREAM) as back:
            assert back.status == 200


async def test_one_tenants_bodies_that_do_not_arrive_leave_room_for_others(offline_settings: Settings) -> None:
    """Whoever opens as many requests as may be in flight and sends nothing must not shut everybody out."""
    settings = msgspec.structs.replace(offline_settings, max_in_flight=20)
    async with fake_replica() as replica, running_gateway(settings, route(replica, "r0")) as served:
        port = int(served.url.rsplit(":", 1)[1])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in idle:
            writer.write(head_of(served) + b"{")
        refused = {asyncio.create_task(reader.readline()) for reader, _ in idle}
        done, waiting = await asyncio.wait(refused, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 4:
            more, waiting = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            assert more, "as many bodies of one tenant are awaited as may be in flight"
            done |= more
        assert {task.result() for task in done} == {b"HTTP/1.1 503 Service Unavailable\r\n"}
        assert served.gateway.in_flight == 16
        other = served.policy.key(tenant="other", tenant_id="other")
        async with served.post(CHAT, key=other) as answer:
            assert answer.status == 200, await answer.text()
        async with served.post(CHAT) as answer:
            check_error(await answer.json(), "too_many_bodies")
        for task in waiting:
            task.cancel()
        for _, writer in idle:
            writer.close()
        await served.settled(22)
        assert served.gateway.in_flight == 0


async def test_a_refused_client_that_sends_without_end_is_cut_off(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.gateway.asgi.DISCARD_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    writer.write(head_of(served, 10**9))
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 413")
    writer.close()
