"""Connections to replicas.

Layer: service. One pooled client; every way a replica can fail to answer becomes an `UpstreamFailure` with a cause and
whether another replica may be tried. It must never follow a redirect, retry by itself, or connect to an address that
replicas may not have (F34).
"""

from __future__ import annotations

import enum
import io

import aiohttp
from yarl import URL

from controlplane.egress import TargetRefusedError, parse_target
from controlplane.fleet.addresses import replica_policy
from controlplane.gateway.guarded import AddressRefusedError, GuardedResolver
from controlplane.settings import Settings

CONNECT_S = 5.0
KEEPALIVE_S = 15.0
MAX_URLS = 4096
COPY_LIMIT = 512 * 1024
"""Larger bodies are handed to the client as a file object, in pieces."""


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


class UpstreamFailure(Exception):  # noqa: N818  # a failure of theirs, not an error of ours
    """A replica failed with `cause`."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause


def failure_of(error: BaseException) -> UpstreamFailure:
    """The failure behind an exception of the HTTP client."""
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, AddressRefusedError):
        return UpstreamFailure(Cause.REFUSED)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return UpstreamFailure(Cause.UNREACHABLE)
    if isinstance(error, TimeoutError):
        return UpstreamFailure(Cause.TIMEOUT)
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return UpstreamFailure(Cause.RESET)
    return UpstreamFailure(Cause.PROTOCOL)


CLIENT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)
"""Everything the client raises when a replica does not behave."""


class Upstream:
    """The client all requests share. Open it inside the running loop, close it at the end."""

    def __init__(self, settings: Settings) -> None:
        self._policy = replica_policy(settings)
        connector = aiohttp.TCPConnector(
            limit=0, limit_per_host=0, keepalive_timeout=KEEPALIVE_S, resolver=GuardedResolver(self._policy)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
            headers={
                "authorization": f"Bearer {settings.internal_token.reveal()}",
                "content-type": "application/json",
                "accept-encoding": "identity",
            },
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=settings.upstream_timeout_s),
        )
        self._urls: dict[str, URL] = {}

    async def post(self, url: str, headers: dict[str, str], body: bytes) -> aiohttp.ClientResponse:
        """Send a request; returns once the response's headers are there. Raises UpstreamFailure. The caller closes
        it.
        """
        data: bytes | io.BytesIO = body if len(body) <= COPY_LIMIT else io.BytesIO(body)
        try:
            return await self._session.post(self._url(url), data=data, headers=headers, allow_redirects=False)
        except CLIENT_ERRORS as error:
            raise failure_of(error) from error

    async def close(self) -> None:
        await self._session.close()

    def _url(self, url: str) -> URL:
        known = self._urls.get(url)
        if known is None:
            if len(self._urls) >= MAX_URLS:
                self._urls.clear()
            self._require_allowed(url)
            known = self._urls[url] = URL(url, encoded=True)
        return known

    def _require_allowed(self, url: str) -> None:
        """A host that is an address is not asked of the resolver, so it is judged here. Raises UpstreamFailure."""
        try:
            target = parse_target(url)
            if target.address is not None:
                self._policy.require(target.address)
        except TargetRefusedError:
            raise UpstreamFailure(Cause.REFUSED) from None
