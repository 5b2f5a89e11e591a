"""Turning exceptions into responses: one JSON shape for APIs, a page for the console.

Layer: service. Programs get {"error": {"message", "type", "param", "code"}} on /v1, /api and /internal; people get
a page. An unexpected exception is logged with its request id and answered without its text: no traceback, no
secret reaches a client. Expected refusals are not logged as errors.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException, ValidationException

from controlplane.errors import CapacityError, InvalidRequestError, TidegateError
from controlplane.outage import away, unstorable
from controlplane.request_id import request_id

log = logging.getLogger("tidegate.app")

JSON_PREFIXES = ("/v1", "/api/", "/internal/", "/metrics", "/healthz", "/events/")
"""Paths read by programs; every other path of the control plane is a page."""

_NAMED_FIELD = re.compile(r"(?:missing required|unknown) field `(\w+)`")

_DATA = re.compile(r"^data\b")
"""What the framework calls the body, and not the beginning or the end of a field's name."""

_NO_OBJECT = ("'data'", "Expected `object`")
"""What the framework says of a body that is empty (in a KeyError's words) or holds something else."""

_UNREADABLE = "while deserializing"
"""In the words of msgspec's own recursion errors, and of no other."""

_TYPES = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    409: ("conflict_error", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    422: ("invalid_request_error", "invalid_request"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("server_error", "unavailable"),
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """`message` is one sentence, `code` a stable name, `param` the input at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every error of every JSON surface, in OpenAI's shape."""

    error: ErrorDetail


def on_expected(request: Request[Any, Any, Any], error: TidegateError) -> Response[Any]:
    """A refusal the services raised on purpose."""
    detail = ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)
    return _respond(request, error.status, detail, error.headers)


def on_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    """What the framework refused: no such route, wrong method, unreadable or oversized body."""
    status = error.status_code
    kind, code = _TYPES.get(status, ("server_error", "internal_error") if status >= 500 else _TYPES[400])
    message, param = _sentence(request, error)
    detail = ErrorDetail(message=message, type=kind, param=param, code=code)
    return _respond(request, status, detail, dict(error.headers or {}))


def on_unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """What cannot be stored or read (400), a store that is away (503), or a defect (500, logged with its traceback)."""
    refusal: TidegateError
    if unstorable(error):
        refusal = InvalidRequestError(
            "the request holds a character, a length, a time or a number that cannot be stored"
        )
        return on_expected(request, refusal)
    if isinstance(error, RecursionError) and _UNREADABLE in str(error):
        return on_expected(request, InvalidRequestError("the body is nested too deeply", param="body"))
    store = away(error)
    identifier = request_id(request.scope)
    if store is not None:
        reason = type(error).__name__
        extra = {"request_id": identifier}
        log.warning("%s %s: %s is away: %s", request.method, request.url.path, store, reason, extra=extra)
        refusal = CapacityError(
            f"the {store} cannot be reached right now; try again in a moment",
            code=f"{store}_away",
            headers={"retry-after": "2"},
        )
        return on_expected(request, refusal)
    log.error("%s %s failed", request.method, request.url.path, exc_info=error, extra={"request_id": identifier})
    detail = ErrorDetail(
        message=f"the server failed to handle this request; its log names it {identifier}",
        type="server_error",
        code="internal_error",
    )
    return _respond(request, 500, detail, {})


def _sentence(request: Request[Any, Any, Any], error: HTTPException) -> tuple[str, str | None]:
    if isinstance(error, MethodNotAllowedException):
        return f"{request.method} is not allowed on {request.url.path}", None
    if error.status_code == 404:
        return f"nothing is served at {request.url.path}", None
    if isinstance(error, ValidationException) and isinstance(error.extra, list) and error.extra:
        problem = error.extra[0]
        text = str(problem.get("message", "is not valid"))
        named = _NAMED_FIELD.search(text)
        key = named.group(1) if named else _DATA.sub("body", str(problem.get("key") or "body"))
        if key == "body" and text.startswith(_NO_OBJECT):
            return "a JSON object is expected as the body", key
        return f"{key}: {text}", key
    return str(error.detail), None


def _respond(
    request: Request[Any, Any, Any], status: int, detail: ErrorDetail, headers: dict[str, str]
) -> Response[Any]:
    templates = request.app.state.get("templates")
    if templates is None or request.url.path.startswith(JSON_PREFIXES):
        return Response(ErrorBody(detail), status_code=status, headers=headers, media_type=MediaType.JSON)
    identifier = request_id(request.scope)
    try:
        page = templates.render("errors.html", status=status, message=detail.message, request_id=identifier)
    except Exception:  # an error page that fails must not hide the error
        log.exception("errors.html cannot be rendered", extra={"request_id": identifier})
        return Response(detail.message, status_code=status, headers=headers, media_type=MediaType.TEXT)
    return Response(page, status_code=status, headers=headers, media_type=MediaType.HTML)
