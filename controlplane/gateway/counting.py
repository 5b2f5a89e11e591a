"""Asking a replica how many tokens a request's prompts have.

Layer: service. Only for a request that the bound on its prompts (`size`) would have refused. Few are asked at a time
and not for long: who cannot be told stays with the bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import msgspec

from controlplane.gateway.http_client import HttpError
from controlplane.gateway.upstream import Upstream, UpstreamFailure
from dataplane.protocol import COUNT_SUFFIX, TokenCount

MOST_AT_ONCE = 16
MOST_OF_ONE = 4
"""Of these, one tenant's."""
TIMEOUT_S = 2.0
MOST_BYTES = 4096
"""A longer answer is none."""

logger = logging.getLogger("tidegate.gateway")

_COUNT = msgspec.json.Decoder(TokenCount)


class PromptCounter:
    """Asks through `upstream`."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._asking: Counter[str] = Counter()

    async def count(self, tenant: str, url: str, headers: dict[str, str], body: bytes) -> int | None:
        """Tokens of all prompts of `body`, which `url` would generate from; None when nobody told."""
        if self._asking.total() >= MOST_AT_ONCE or self._asking[tenant] >= MOST_OF_ONE:
            return None
        self._asking[tenant] += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._ask(url + COUNT_SUFFIX, headers, body)
        except (UpstreamFailure, HttpError, TimeoutError, msgspec.MsgspecError) as error:
            logger.warning("A replica did not count a prompt (%s); its bound stands", type(error).__name__)
            return None
        finally:
            self._asking[tenant] -= 1
            if not self._asking[tenant]:
                del self._asking[tenant]

    async def _ask(self, url: str, headers: dict[str, str], body: bytes) -> int | None:
        response = await self._upstream.post(url, headers, body)
        try:
            if response.status != 200:
                return None
            answer = b""
            while len(answer) <= MOST_BYTES and (data := await response.read()):
                answer += data
        finally:
            response.close()
        return _COUNT.decode(answer).prompt_tokens if len(answer) <= MOST_BYTES else None
