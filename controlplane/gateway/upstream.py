"""Requests to replicas.

Layer: service. Every way a replica can fail to answer becomes an `UpstreamFailure` with a cause, which says whether
another replica may be tried. It must never connect to an address that replicas may not have (F34).
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

from controlplane.fleet.addresses import replica_policy
from controlplane.gateway.guarded import GuardedAddresses
from controlplane.gateway.http_client import (
    HttpError,
    HttpPool,
    LostError,
    RefusedError,
    Response,
    SilentError,
    UnreachableError,
)
from controlplane.settings import Settings


class Cause(enum.StrEnum):
    """Why a replica gave no whole answer."""

    UNAVAILABLE = "replica_unavailable"
    UNREACHABLE = "upstream_unreachable"
    REFUSED = "upstream_address_refused"
    RESET = "upstream_reset"
    TIMEOUT = "upstream_timeout"
    PROTOCOL = "upstream_protocol"
    ERROR = "upstream_error"
    TRUNCATED = "upstream_truncated"
    SHUTDOWN = "gateway_shutdown"


_CAUSES: dict[type[HttpError], Cause] = {
    RefusedError: Cause.REFUSED,
    UnreachableError: Cause.UNREACHABLE,
    SilentError: Cause.TIMEOUT,
    LostError: Cause.RESET,
}


class UpstreamFailure(Exception):  # noqa: N818  # a failure of theirs, not an error of ours
    """A replica failed with `cause`."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause


def failure_of(error: HttpError) -> UpstreamFailure:
    """The failure behind an exception of the HTTP client."""
    return UpstreamFailure(_CAUSES.get(type(error), Cause.PROTOCOL))


class Upstream:
    """The connections all requests share. Make it inside the running loop, close it at the end."""

    def __init__(self, settings: Settings) -> None:
        self._pool = HttpPool(settings.upstream_timeout_s, GuardedAddresses(replica_policy(settings)))
        self._headers = {
            "authorization": f"Bearer {settings.internal_token.reveal()}",
            "content-type": "application/json",
            "accept-encoding": "identity",
        }

    @property
    def in_use(self) -> int:
        """Requests sent whose response was not closed."""
        return self._pool.in_use

    async def post(
        self, url: str, headers: dict[str, str], body: bytes, on_sent: Callable[[], None] = lambda: None
    ) -> Response:
        """Send a request; returns once the response's head is there. Raises UpstreamFailure. The caller closes it.
        `on_sent` is called when there is a connection and the request goes out.
        """
        try:
            return await self._pool.post(url, self._headers | headers, body, on_sent)
        except HttpError as error:
            raise failure_of(error) from error

    async def close(self) -> None:
        self._pool.close()
        await asyncio.sleep(0)  # sockets are closed in the loop's next turn
