"""Errors that carry their HTTP status, reason and layer.

Layer: service. Services raise these; the application turns them into one response shape per surface
(OpenAI error body on `/v1`, problem body on `/api/v1`, a page on the console). An expected refusal is not
logged as an error and pages nobody.
"""

from __future__ import annotations

from typing import ClassVar

from controlplane.layers import Layer


class TidegateError(Exception):
    """Base of every expected error.

    `message` is one sentence for the reader, `code` a stable machine name, `param` the input at fault,
    `headers` extra response headers (Retry-After, x-tidegate-reason).
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        layer: Layer = Layer.SERVICE,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.layer = layer
        self.headers = headers or {}


class InvalidRequestError(TidegateError):
    status = 400
    type = "invalid_request_error"
    default_code = "invalid_request"


class AuthenticationError(TidegateError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDeniedError(TidegateError):
    status = 403
    type = "permission_error"
    default_code = "permission_denied"


class NotFoundError(TidegateError):
    status = 404
    type = "not_found_error"
    default_code = "not_found"


class ConflictError(TidegateError):
    status = 409
    type = "conflict_error"
    default_code = "conflict"


class PayloadTooLargeError(TidegateError):
    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class RateLimitedError(TidegateError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class CapacityError(TidegateError):
    status = 503
    type = "server_error"
    default_code = "no_capacity"


class UpstreamError(TidegateError):
    status = 502
    type = "server_error"
    default_code = "upstream_error"
