"""Errors only a gateway raises, and the OpenAI body every error on /v1 gets.

Layer: service. The body is `{"error": {"message", "type", "param", "code"}}`. A message must never hold a key, a
prompt or an internal address.
"""

from __future__ import annotations

import msgspec

from controlplane.errors import CapacityError, TidegateError
from controlplane.layers import Layer
from dataplane.protocol import HEADER_REASON


class MethodNotAllowedError(TidegateError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class RequestTimeoutError(TidegateError):
    """The client took too long to send its body."""

    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class UnsupportedMediaTypeError(TidegateError):
    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_content_encoding"


class UpstreamTimeoutError(TidegateError):
    """No replica answered in time."""

    status = 504
    type = "server_error"
    default_code = "upstream_timeout"


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody left to answer."""


def capacity(message: str, code: str, *, layer: Layer = Layer.SERVICE, retry_after_s: int = 1) -> CapacityError:
    """A 503 that says when to come back and which layer is out of capacity. The wait is an estimate."""
    headers = {"retry-after": str(retry_after_s), HEADER_REASON: f"{code}; layer={layer.value}; retry-after=estimate"}
    return CapacityError(message, code=code, layer=layer, headers=headers)


def error_body(error: TidegateError) -> bytes:
    """The OpenAI error body of `error`."""
    detail = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": detail})


def error_event(error: TidegateError) -> bytes:
    """The event that ends a stream which cannot go on."""
    return b"data: " + error_body(error) + b"\n\n"
