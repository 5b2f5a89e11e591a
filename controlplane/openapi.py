"""The OpenAPI 3.1 document of the admin API, at /api/v1/openapi.json.

Layer: service. The framework derives operations and schemas from the handlers; this completes them with what every
route has in common (errors, the security scheme) and leaves out what is not the admin API: pages, internal
routes, metrics. No documentation page is served: those that exist load scripts from other hosts.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from litestar import Request
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, License, SecurityScheme, Server, Tag

from controlplane.error_responses import ErrorBody

PATH = "/api/v1/openapi.json"
SECURITY = "adminToken"
_DOCUMENTED = ("/api/v1/", "/healthz")
_OPEN = frozenset({"/healthz"})

_PAGE_OF = re.compile(rb"Page_(?:\w+\.)*(\w+?)(?:View)?_(?=\")")
"""The framework's name for `Page[TenantView]`, which clients see as TenantPage."""

_ERRORS = {
    "400": ("BadRequest", "The request is not valid; `param` names the field.", "invalid_request_error"),
    "401": ("Unauthorized", "No valid admin token was sent.", "authentication_error"),
    "403": ("Forbidden", "The token's role may not do this.", "permission_error"),
    "404": ("NotFound", "There is no such thing.", "not_found_error"),
    "409": ("Conflict", "It exists already, or changed meanwhile.", "conflict_error"),
    "413": ("TooLarge", "The body is larger than this route takes.", "invalid_request_error"),
    "500": ("ServerError", "A defect; the log names the request by its x-request-id.", "server_error"),
    "503": ("Unavailable", "A store cannot be reached; try again after Retry-After seconds.", "server_error"),
}


def config() -> OpenAPIConfig:
    """The framework's configuration for the document."""
    return OpenAPIConfig(
        title="Tidegate admin API",
        version=_version(),
        description=(
            "Tenants, keys, the fleet and its telemetry. Every error has the body "
            '`{"error": {"message", "type", "param", "code"}}`; every response carries `x-request-id`.'
        ),
        license=License(name="Apache-2.0", identifier="Apache-2.0"),
        servers=[Server(url="/", description="this control plane")],
        tags=[
            Tag(name="tenants", description="Whom the gateway serves."),
            Tag(name="projects", description="What groups a tenant's keys."),
            Tag(name="principals", description="People and service accounts, who own keys."),
            Tag(name="keys", description="API keys of tenants; shown once, stored hashed."),
            Tag(name="quotas", description="Limits of tenants, temporary raises, and requests for more."),
            Tag(name="prices", description="What use of a pool costs, with its history."),
            Tag(name="canaries", description="When each limit was last proven to hold."),
            Tag(name="slos", description="Objectives promised per tenant, pool and class."),
            Tag(name="policy", description="Which policy is in force where, what changed, and the way back."),
            Tag(name="accounts", description="Operators' own access."),
            Tag(name="fleet", description="Pools and replicas."),
            Tag(name="telemetry", description="What the gateways and engines measured."),
            Tag(name="usage", description="What tenants used, from the ledger."),
            Tag(name="prompt log", description="Prompts and answers that tenants asked to be kept, and who read them."),
            Tag(name="process", description="This process."),
        ],
        components=Components(
            security_schemes={
                SECURITY: SecurityScheme(
                    type="http",
                    scheme="bearer",
                    description="An admin token (`tga_…`), not a tenant's API key.",
                )
            }
        ),
        use_handler_docstrings=False,
        path=PATH,
        render_plugins=[AdminApiDocument(path=["/", "/openapi.json"])],
    )


class AdminApiDocument(JsonRenderPlugin):
    """Serves the completed document, made once."""

    def __init__(self, *, path: list[str]) -> None:
        super().__init__(path=path)
        self._rendered: bytes | None = None

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        if self._rendered is None:
            self._rendered = msgspec.json.encode(complete(openapi_schema))
        return self._rendered


def complete(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` restricted to the admin API, with errors and security on every operation."""
    paths = {
        path: {method: _operation(path, method, operation) for method, operation in item.items()}
        for path, item in schema["paths"].items()
        if path.startswith(_DOCUMENTED)
    }
    components = schema.get("components", {})
    (_,), error_schemas = msgspec.json.schema_components([ErrorBody], ref_template="#/components/schemas/{name}")
    schemas = {**components.get("schemas", {}), **error_schemas}
    responses = {name: _response(text, kind) for name, text, kind in _ERRORS.values()}
    document = {
        **schema,
        "paths": paths,
        "components": {**components, "schemas": _reached(schemas, [paths, responses]), "responses": responses},
    }
    renamed = _PAGE_OF.sub(rb"\1Page", msgspec.json.encode(document))
    return msgspec.json.decode(renamed, type=dict[str, Any])


def _operation(path: str, method: str, operation: dict[str, Any]) -> dict[str, Any]:
    if path in _OPEN:
        return {**operation, "security": []}
    expected = ["400", "401", "500", "503"]
    if method != "get":
        expected += ["403", "409", "413"]
    if "{" in path:
        expected.append("404")
    declared = {status: response for status, response in operation["responses"].items() if status not in _ERRORS}
    errors = {status: {"$ref": f"#/components/responses/{_ERRORS[status][0]}"} for status in sorted(expected)}
    return {**operation, "responses": {**declared, **errors}, "security": [{SECURITY: []}]}


def _response(description: str, kind: str) -> dict[str, Any]:
    example = {"error": {"message": description, "type": kind, "param": None, "code": None}}
    content = {"schema": {"$ref": "#/components/schemas/ErrorBody"}, "examples": {"error": {"value": example}}}
    request_id = {"schema": {"type": "string"}, "description": "names this request in the logs"}
    return {
        "description": description,
        "headers": {"x-request-id": request_id},
        "content": {"application/json": content},
    }


def _reached(schemas: dict[str, Any], roots: list[Any]) -> dict[str, Any]:
    """Those of `schemas` that `roots` refer to, directly or not."""
    kept: dict[str, Any] = {}
    waiting: list[Any] = list(roots)
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix("#/components/schemas/")
            if name in schemas and name not in kept:
                kept[name] = schemas[name]
                waiting.append(schemas[name])
            waiting += node.values()
    return dict(sorted(kept.items()))


def _version() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0"
