"""The OpenAPI document: valid, complete, and only the admin API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from litestar.routes import HTTPRoute
from openapi_spec_validator import OpenAPIV31SpecValidator

from controlplane.app import Application, Role, create_app
from controlplane.settings import Settings
from tests.controlplane.clients import started


@pytest.fixture
def app(offline_settings: Settings) -> Application:
    return create_app(Role.CONTROL, offline_settings)


@pytest.fixture
async def document(app: Application) -> dict[str, Any]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://console.example") as client:
        answer = await client.get("/api/v1/openapi.json")
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return found


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, op) for path, item in document["paths"].items() for method, op in item.items()]


async def test_it_is_valid_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []


async def test_it_holds_every_route_of_the_admin_api_and_nothing_else(
    app: Application, document: dict[str, Any]
) -> None:
    routed = {
        (route.path_format, method.lower())
        for route in app.routes
        if isinstance(route, HTTPRoute)
        and (route.path.startswith("/api/v1/") or route.path == "/healthz")
        and not route.path.startswith("/api/v1/openapi.json")
        for method in route.methods - {"OPTIONS"}
    }
    assert {(path, method) for path, method, _ in operations(document)} == routed


async def test_every_operation_is_named_once_and_explained(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names) == len(set(names))
    for path, method, operation in operations(document):
        assert operation["summary"], (path, method)
        assert set(operation["tags"]) <= {tag["name"] for tag in document["tags"]}, (path, method)


async def test_every_operation_but_health_asks_for_the_admin_token_and_says_how_it_fails(
    document: dict[str, Any],
) -> None:
    assert document["components"]["securitySchemes"]["adminToken"]["scheme"] == "bearer"
    for path, method, operation in operations(document):
        if path == "/healthz":
            assert operation["security"] == []
            continue
        assert operation["security"] == [{"adminToken": []}]
        expected = {"400", "401", "500", "503"}
        expected |= {"403", "409", "413"} if method != "get" else set()
        expected |= {"404"} if "{" in path else set()
        assert expected <= set(operation["responses"]), (path, method)
        success = [operation["responses"][status] for status in operation["responses"] if status < "300"]
        assert success, (path, method)


async def test_errors_have_one_shape_with_an_example(document: dict[str, Any]) -> None:
    for response in document["components"]["responses"].values():
        content = response["content"]["application/json"]
        assert content["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
        assert content["examples"]["error"]["value"]["error"]["type"]


async def test_no_schema_is_left_over_or_named_after_a_module(document: dict[str, Any]) -> None:
    text = str(document["paths"]) + str(document["components"])
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text
        assert "controlplane" not in name
    assert "TenantPage" in document["components"]["schemas"]


async def test_a_request_body_says_what_is_allowed(document: dict[str, Any]) -> None:
    slug = document["components"]["schemas"]["TenantRequest"]["properties"]["slug"]
    assert slug["pattern"] == "^[a-z0-9-]{1,40}$"
    assert slug["examples"] == ["acme"]


async def test_the_document_loads_nothing_from_elsewhere(app: Application) -> None:
    transport = httpx.ASGITransport(app)
    async with started(app), httpx.AsyncClient(transport=transport, base_url="http://console.example") as client:
        text = (await client.get("/api/v1/openapi.json")).text
    assert "cdn" not in text.lower()
