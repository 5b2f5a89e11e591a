"""The replica's addresses.

Layer: service. A dispatch table over raw ASGI: two generating routes, two that count and four small ones. It starts and
stops nothing and keeps no state. No web framework: for eight routes it would double the front's memory (46 to 99 MB)
and triple the CPU time of its start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from dataplane.api_error import ApiError
from dataplane.counting import CountingEndpoint
from dataplane.generation import INTERNAL, JSON, GenerationEndpoint
from dataplane.http_exchange import ClientGoneError, Exchange, Receive, Scope, Send
from dataplane.metrics import registry_of
from dataplane.openai_bodies import model_body
from dataplane.protocol import HEADER_REPLICA, ReplicaState
from dataplane.replica import Replica

logger = logging.getLogger(__name__)

Answer = tuple[int, tuple[str, str], bytes]
"""Status, content type header and body."""

_json = msgspec.json.Encoder().encode


class ReplicaApp:
    """The replica as an ASGI application."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._registry: CollectorRegistry = registry_of(replica)
        self._posted: dict[str, GenerationEndpoint | CountingEndpoint] = {
            "/v1/chat/completions": GenerationEndpoint.chat(replica),
            "/v1/completions": GenerationEndpoint.completions(replica),
            **CountingEndpoint.routes(replica),
        }
        self._reading: dict[str, Callable[[Exchange], Answer]] = {
            "/v1/models": self._models,
            "/healthz": self._health,
            "/metrics": self._metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope["path"])
        posted = self._posted.get(path)
        if posted is not None:
            await posted(scope, receive, send)
            return
        config = self._replica.config
        exchange = Exchange(scope, receive, send, timeout_s=config.client_timeout_s)
        try:
            status, content_type, body = self._read(path, exchange)
            headers = [content_type]
        except ApiError as error:
            status, headers, body = error.status, error.headers(), error.body()
        except Exception:
            logger.exception("%s failed", path)
            status, headers, body = INTERNAL.status, INTERNAL.headers(), INTERNAL.body()
        try:
            await exchange.answer(status, [(HEADER_REPLICA, config.replica), *headers], body)
        except ClientGoneError:
            logger.debug("the client left before the answer to %s", path)

    def _read(self, path: str, exchange: Exchange) -> Answer:
        """Answer a GET. Raises ApiError."""
        handler = self._reading.get(path)
        if handler is None and path.startswith("/v1/models/"):
            handler = self._model
        if handler is None:
            raise ApiError(404, "there is nothing at this address", code="not_found")
        if exchange.method != "GET":
            raise ApiError(405, "this address takes GET only", code="method_not_allowed")
        return handler(exchange)

    def _models(self, exchange: Exchange) -> Answer:
        self._admit(self._replica.config.admits(exchange.authorization))
        return 200, JSON, _json({"object": "list", "data": [self._described()]})

    def _model(self, exchange: Exchange) -> Answer:
        self._admit(self._replica.config.admits(exchange.authorization))
        asked = exchange.path.removeprefix("/v1/models/")
        if asked != self._replica.config.served_model:
            raise ApiError(404, f"the model {asked[:200]!r} is not served here", code="model_not_found", param="model")
        return 200, JSON, _json(self._described())

    def _health(self, exchange: Exchange) -> Answer:
        replica = self._replica
        body = {"state": replica.state, "reason": replica.reason, "replica": replica.config.replica}
        return (200 if replica.state is ReplicaState.READY else 503), JSON, _json(body)

    def _metrics(self, exchange: Exchange) -> Answer:
        self._admit(self._replica.config.admits_metrics(exchange.authorization))
        return 200, ("content-type", CONTENT_TYPE_LATEST), generate_latest(self._registry)

    def _described(self) -> dict[str, Any]:
        replica = self._replica
        return model_body(replica.config.served_model, int(replica.started_at), replica.ready)

    @staticmethod
    def _admit(admitted: bool) -> None:
        if not admitted:
            raise ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key")
