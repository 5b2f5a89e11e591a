"""Errors of the replica's HTTP API in OpenAI's shape.

Layer: service. One exception carries status, sentence, code, parameter and when to ask again; it renders
itself. It never holds anything secret or a traceback.
"""

from __future__ import annotations

import math

import msgspec


class ApiError(Exception):
    """An answer other than 200. `retry_after_s` becomes the Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's class of error."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 404 and self.code != "model_not_found":
            return "not_found_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        """`{"error": {message, type, param, code}}` as JSON."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def headers(self) -> list[tuple[str, str]]:
        headers = [("content-type", "application/json")]
        if self.retry_after_s is not None:
            headers.append(("retry-after", str(max(1, math.ceil(self.retry_after_s)))))
        if self.status == 401:
            headers.append(("www-authenticate", "Bearer"))
        return headers


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400: what the caller sent can never work."""
    return ApiError(400, message, code=code, param=param)


def unavailable(message: str, *, code: str, retry_after_s: float) -> ApiError:
    """A 503: the same request may work later or elsewhere."""
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)
