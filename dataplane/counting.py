"""POST /v1/chat/completions/tokens and /v1/completions/tokens: how many tokens a request's prompts have.

Layer: service. Takes the very body of the generating route and answers `{"prompt_tokens": n, "prompts": k}` with the
same tokenizer and template, so that a gateway can judge a limit by the number and not by a bound. Nothing reaches the
engine core.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import msgspec

from dataplane.api_error import ApiError
from dataplane.generation import INTERNAL, JSON
from dataplane.http_exchange import ClientGoneError, Exchange, Receive, Scope, Send
from dataplane.openai import Call, parse_chat, parse_completion
from dataplane.protocol import COUNT_SUFFIX, HEADER_REPLICA, TokenCount
from dataplane.replica import Replica

logger = logging.getLogger(__name__)

_json = msgspec.json.Encoder().encode


class CountingEndpoint:
    """One of the counting routes as an ASGI application."""

    def __init__(self, replica: Replica, parse: Callable[[bytes, str], Call]) -> None:
        self._replica = replica
        self._parse = parse

    @classmethod
    def routes(cls, replica: Replica) -> dict[str, CountingEndpoint]:
        """Every counting route by its path."""
        return {
            f"/v1/chat/completions{COUNT_SUFFIX}": cls(replica, parse_chat),
            f"/v1/completions{COUNT_SUFFIX}": cls(replica, parse_completion),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._replica.config
        exchange = Exchange(scope, receive, send, timeout_s=config.client_timeout_s)
        headers = [(HEADER_REPLICA, config.replica)]
        try:
            try:
                status, body = 200, _json(await self._count(exchange))
                headers.append(JSON)
            except ApiError as error:
                status, body = error.status, error.body()
                headers += error.headers()
            await exchange.answer(status, headers, body)
        except ClientGoneError:
            pass
        except Exception:
            logger.exception("the tokens of a request could not be counted")
            with contextlib.suppress(ClientGoneError):
                await exchange.answer(INTERNAL.status, [*headers, *INTERNAL.headers()], INTERNAL.body())
        finally:
            await exchange.close()

    async def _count(self, exchange: Exchange) -> TokenCount:
        """Raises ApiError."""
        config = self._replica.config
        if exchange.method != "POST":
            raise ApiError(405, "this address takes POST only", code="method_not_allowed")
        if not config.admits(exchange.authorization):
            raise ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key")
        call = self._parse(await exchange.body(config.max_body_bytes), config.served_model)
        lengths = await self._replica.count(call)
        return TokenCount(prompt_tokens=sum(lengths), prompts=len(lengths))
