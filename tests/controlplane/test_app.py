"""The application around the domains: errors, request ids, limits, health, transactions and headers."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.app import Application, Role, create_app
from controlplane.db import after_commit, transaction
from controlplane.errors import ConflictError
from controlplane.settings import Settings
from controlplane.tenants import service
from tests.controlplane.clients import Deployment, deployment, started


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings, ["tenants", "accounts"]) as running:
        yield running


@pytest.fixture
async def offline(offline_settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A control plane whose Postgres and Redis are away."""
    app = create_app(Role.CONTROL, offline_settings, domains=["tenants", "accounts"])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with started(app), httpx.AsyncClient(transport=transport, base_url="http://console.example") as client:
        yield client


def broken(app: Application, path: str, error: Exception) -> None:
    @get(path)
    async def fails() -> None:
        raise error

    app.register(fails)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


async def test_an_expected_error_keeps_its_status_code_param_and_headers(deployed: Deployment) -> None:
    broken(deployed.app, "/api/v1/x", ConflictError("it is there", param="slug", headers={"retry-after": "7"}))
    answer = await deployed.client.get("/api/v1/x", headers=deployed.operator)
    assert answer.status_code == 409
    assert answer.headers["retry-after"] == "7"
    assert error_of(answer) == {"message": "it is there", "type": "conflict_error", "param": "slug", "code": "conflict"}


async def test_a_defect_shows_the_client_an_id_and_the_log_the_traceback(
    deployed: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    broken(deployed.app, "/api/v1/x", RuntimeError("the inner secret"))
    answer = await deployed.client.get("/api/v1/x", headers={**deployed.operator, "x-request-id": "find-me"})
    assert answer.status_code == 500
    assert "find-me" in error_of(answer)["message"]
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    record = next(record for record in caplog.records if getattr(record, "request_id", "") == "find-me")
    assert record.exc_info is not None
    assert "the inner secret" in str(record.exc_info[1])


async def test_a_page_error_is_a_page_and_an_api_error_is_json(deployed: Deployment) -> None:
    page = await deployed.client.get("/no-such-page", headers={"accept": "text/html"})
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert "nothing is served at /no-such-page" in page.text.lower()
    api = await deployed.client.get("/api/v1/no-such-thing")
    assert api.status_code == 404
    assert error_of(api)["code"] == "not_found"


async def test_an_error_page_that_fails_falls_back_to_text(deployed: Deployment) -> None:
    class Failing:
        def render(self, *_: object, **__: object) -> str:
            raise RuntimeError("no template")

    deployed.app.state.templates = Failing()
    page = await deployed.client.get("/no-such-page")
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/plain")
    assert "nothing is served" in page.text


async def test_the_wrong_method_is_named(deployed: Deployment) -> None:
    answer = await deployed.client.put("/api/v1/tenants", headers=deployed.operator)
    assert answer.status_code == 405
    assert "PUT" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"", "body"),
        (b"[]", "body"),
        (b'{"slug": "UPPER", "name": "x"}', "slug"),
        (b'{"slug": "acme"}', "name"),
        (b'{"slug": "acme", "name": "x", "extra": 1}', "extra"),
        (b'{"slug": 1, "name": "x"}', "slug"),
        (b'{"slug": "acme", "name": "\\u0000"}', "name"),
        (b'{"slug": "acme", "name": "x", "metadata": {"": "y"}}', "metadata"),
        (b"\xff\xfe", None),
    ],
)
async def test_an_unreadable_body_is_a_400_with_a_sentence(
    deployed: Deployment, body: bytes, param: str | None
) -> None:
    headers = {**deployed.operator, "content-type": "application/json"}
    answer = await deployed.client.post("/api/v1/tenants", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"1"])
async def test_without_an_object_as_body_a_json_object_is_asked_for(deployed: Deployment, body: bytes) -> None:
    headers = {**deployed.operator, "content-type": "application/json"}
    for method, path in (("POST", "/api/v1/tenants"), ("PATCH", "/api/v1/tenants/acme")):
        answer = await deployed.client.request(method, path, content=body, headers=headers)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "body")
        assert error_of(answer)["message"] == "a JSON object is expected as the body"


async def test_a_nul_character_anywhere_is_a_400(deployed: Deployment) -> None:
    for path in ("/api/v1/tenants/%00", "/api/v1/keys/%00"):
        answer = await deployed.client.get(path, headers=deployed.operator)
        assert answer.status_code == 400, answer.text
        assert "character" in error_of(answer)["message"]


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
async def test_an_instant_beyond_every_calendar_is_a_400(deployed: Deployment, at: str) -> None:
    cursor = base64.urlsafe_b64encode(msgspec.msgpack.encode([at, "11111111-1111-1111-1111-111111111111"])).decode()
    answer = await deployed.client.get("/api/v1/tenants", params={"after": cursor}, headers=deployed.operator)
    assert answer.status_code == 400, answer.text
    assert "time" in error_of(answer)["message"]


async def test_a_body_that_is_nested_too_deeply_is_a_400(deployed: Deployment) -> None:
    headers = {**deployed.operator, "content-type": "application/json"}
    for deep in (b'{"name":' * 3000, b"[" * 3000):
        answer = await deployed.client.post("/api/v1/tenants", content=deep, headers=headers)
        assert answer.status_code == 400, answer.text
        assert error_of(answer)["message"] == "the body is nested too deeply"


async def test_an_oversized_body_is_a_413(deployed: Deployment) -> None:
    headers = {**deployed.operator, "content-type": "application/json"}
    big = json.dumps({"slug": "acme2", "name": "x" * 100_000}).encode()
    answer = await deployed.client.post("/api/v1/tenants", content=big, headers=headers)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"


async def test_the_settings_limit_every_other_body(settings: Settings) -> None:
    async with deployment(msgspec.structs.replace(settings, max_body_bytes=1000), ["tenants", "accounts"]) as deployed:

        @post("/api/v1/echo")
        async def echo(data: JSONBody[dict[str, str]]) -> dict[str, str]:
            return data

        deployed.app.register(echo)
        small = await deployed.client.post("/api/v1/echo", json={"a": "b"}, headers=deployed.operator)
        assert small.status_code == 201
        big = await deployed.client.post("/api/v1/echo", json={"a": "b" * 2000}, headers=deployed.operator)
        assert big.status_code == 413


@pytest.mark.parametrize("given", ["abc-123", "A" * 128, "a.b:c_d"])
async def test_a_harmless_request_id_is_kept(deployed: Deployment, given: str) -> None:
    answer = await deployed.client.get("/healthz", headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "A" * 129, "a b", "a\tb", "<script>", "a;b", "tg_ab_cd", "x-TGA_secret"])
async def test_any_other_request_id_is_replaced(deployed: Deployment, given: str) -> None:
    answer = await deployed.client.get("/healthz", headers={"x-request-id": given})
    fresh = answer.headers["x-request-id"]
    assert fresh != given
    assert len(fresh) == 32
    assert fresh != (await deployed.client.get("/healthz")).headers["x-request-id"]


async def test_every_answer_carries_the_security_headers(deployed: Deployment) -> None:
    broken(deployed.app, "/api/v1/x", RuntimeError("x"))
    for path in ("/healthz", "/no-such-page", "/api/v1/tenants", "/api/v1/x", "/api/v1/openapi.json"):
        headers = (await deployed.client.get(path, headers=deployed.operator)).headers
        policy = headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cache-control"] == "no-store"
        assert len(headers.get_list("x-request-id")) == 1


async def test_healthz_tells_what_is_reached(deployed: Deployment) -> None:
    body = (await deployed.client.get("/healthz")).json()
    assert body == {"status": "ok", "role": "control", "postgres": "ok", "redis": "ok"}


async def test_f15_without_stores_the_process_lives_and_nobody_is_told_their_key_is_wrong(
    offline: httpx.AsyncClient,
) -> None:
    alive = await offline.get("/healthz")
    assert alive.status_code == 200
    assert alive.json() == {"status": "ok", "role": "control", "postgres": "away", "redis": "away"}
    refused = await offline.get("/api/v1/tenants", headers={"authorization": "Bearer tga_0123456789abcdef"})
    assert refused.status_code == 503
    assert error_of(refused)["code"] == "database_away"
    assert int(refused.headers["retry-after"]) > 0


async def test_the_gateway_starts_without_stores(offline_settings: Settings) -> None:
    app = create_app(Role.GATEWAY, offline_settings, domains=[])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with started(app), httpx.AsyncClient(transport=transport, base_url="http://gateway.example") as client:
        assert (await client.get("/healthz")).json()["role"] == "gateway"
        lost = await client.get("/", headers={"accept": "text/html"})
        assert lost.status_code == 404
        assert error_of(lost)["code"] == "not_found"
        assert (await client.get("/api/v1/openapi.json")).status_code == 404


async def test_a_request_is_one_transaction(deployed: Deployment) -> None:
    told: list[str] = []

    @post("/api/v1/half")
    async def half(session: NamedDependency[AsyncSession], data: JSONBody[dict[str, bool]]) -> str:
        await service.create_tenant(session, slug="half", name="Half")

        async def tell() -> None:
            told.append("committed")

        after_commit(session, tell)
        if data["fail"]:
            raise ConflictError("no")
        assert told == []
        return "done"

    deployed.app.register(half)
    engine = deployed.app.state.resources.engine

    async def stored() -> int:
        async with transaction(engine) as session:
            count = await session.execute(text("SELECT count(*) FROM tenants WHERE slug = 'half'"))
            return int(count.scalar_one())

    failed = await deployed.client.post("/api/v1/half", json={"fail": True}, headers=deployed.operator)
    assert failed.status_code == 409
    assert (await stored(), told) == (0, [])
    done = await deployed.client.post("/api/v1/half", json={"fail": False}, headers=deployed.operator)
    assert done.status_code == 201
    assert (await stored(), told) == (1, ["committed"])


async def test_a_commit_that_fails_is_not_answered_with_success(deployed: Deployment) -> None:
    @post("/api/v1/late")
    async def late(session: NamedDependency[AsyncSession]) -> str:
        await session.execute(text("CREATE TEMP TABLE once (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
        await session.execute(text("INSERT INTO once VALUES (1), (1)"))
        return "done"

    deployed.app.register(late)
    answer = await deployed.client.post("/api/v1/late", headers=deployed.operator)
    assert answer.status_code == 500


async def test_what_is_below_a_direct_path_is_served_without_the_framework() -> None:
    """It is told the request id and answers with it itself; the path itself and its neighbours stay the framework's."""
    served: list[tuple[str, str]] = []

    async def direct(scope: Any, receive: Any, send: Any) -> None:
        served.append((scope["path"], scope["state"]["request_id"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    app = Application(route_handlers=[], openapi_config=None)
    app.direct_path, app.direct = "/v1/", direct
    answers: list[tuple[int, dict[bytes, bytes]]] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answers.append((message["status"], dict(message["headers"])))

    for path in ("/v1/chat/completions", "/v1", "/v10/x"):
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        await app({**scope, "headers": [(b"x-request-id", b"mine")], "root_path": "", "scheme": "http"}, receive, send)
    assert served == [("/chat/completions", "mine")]
    assert [(status, headers.get(b"x-request-id")) for status, headers in answers] == [
        (204, None),
        (404, b"mine"),
        (404, b"mine"),
    ]
