"""The replica's HTTP front: routes, authentication, the embedded server and the order of start and stop.

Layer: service. One process, one event loop: granian serves, the engine core is a child process. It holds no
request state (see `attempt`) and no policy.

granian opens its port with SO_REUSEPORT, so two servers would silently share one: `free_port` looks first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Sequence
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server
from litestar import Litestar, Request, Response, asgi, get
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope, Send
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from dataplane.api_error import ApiError
from dataplane.generation import GenerationEndpoint
from dataplane.metrics import registry_of
from dataplane.openai_bodies import model_body
from dataplane.protocol import HEADER_REPLICA, ReplicaState
from dataplane.replica import Replica
from dataplane.reporter import GaugeSampler, HttpTransport, Reporter

logger = logging.getLogger(__name__)

LAST_REPORT_S = 2.0
HTTP_STOP_S = 2.0


def create_app(replica: Replica) -> Litestar:
    """The replica's routes. Starting and stopping the replica is the caller's business."""
    config = replica.config
    chat = GenerationEndpoint.chat(replica)
    completions = GenerationEndpoint.completions(replica)
    registry = registry_of(replica)
    created = int(replica.started_at)

    @asgi("/v1/chat/completions", copy_scope=False)
    async def chat_completions(scope: Scope, receive: Receive, send: Send) -> None:
        await chat(scope, receive, send)

    @asgi("/v1/completions", copy_scope=False)
    async def text_completions(scope: Scope, receive: Receive, send: Send) -> None:
        await completions(scope, receive, send)

    def described() -> dict[str, Any]:
        return model_body(config.served_model, created, replica.ready.max_model_len if replica.ready else None)

    @get("/v1/models")
    async def models(request: Request[Any, Any, Any]) -> dict[str, Any]:
        _admit(config.admits(request.headers.get("authorization", "")))
        return {"object": "list", "data": [described()]}

    @get("/v1/models/{model:path}")
    async def model(request: Request[Any, Any, Any]) -> dict[str, Any]:
        _admit(config.admits(request.headers.get("authorization", "")))
        asked = str(request.path_params["model"]).lstrip("/")
        if asked != config.served_model:
            raise ApiError(404, f"the model {asked[:200]!r} is not served here", code="model_not_found", param="model")
        return described()

    @get("/healthz")
    async def healthz() -> Response[dict[str, str]]:
        ready = replica.state is ReplicaState.READY
        body = {"state": str(replica.state), "reason": replica.reason, "replica": config.replica}
        return Response(body, status_code=200 if ready else 503)

    @get("/metrics")
    async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
        _admit(config.admits_metrics(request.headers.get("authorization", "")))
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return Litestar(
        route_handlers=[chat_completions, text_completions, models, model, healthz, metrics],
        exception_handlers={ApiError: _answer_error, HTTPException: _answer_http, Exception: _answer_defect},
        response_headers={HEADER_REPLICA: config.replica},
        openapi_config=None,
        logging_config=None,
    )


def free_port(host: str, port: int) -> int:
    """`port` when nobody listens on it, or a free one for 0. Raises OSError when it is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Without SO_REUSEPORT a listening socket of anybody makes this fail.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


class ReplicaServer:
    """Runs one replica: core, reports and HTTP, and takes them down in order."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        config = replica.config
        self._http: Any = Server(
            create_app(replica),
            address=config.host,
            port=config.port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            log_enabled=False,
        )
        self._transport: HttpTransport | None = None
        self._reporter: Reporter | None = None
        if config.control_url:
            self._transport = HttpTransport(config.control_url, config.internal_token)
            self._reporter = Reporter(replica, self._transport, interval_s=config.report_interval_s)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """Ask to stop: running requests may go on for a while; a second call ends them."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> bool:
        """Serve until told to stop. False when it ended by itself: the core can never work, or HTTP broke."""
        loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        await self.replica.start()
        http = asyncio.create_task(self._http.serve(), name="http")
        background = [asyncio.create_task(GaugeSampler(self.replica).run(), name="gauges")]
        if self._reporter is not None:
            background.append(asyncio.create_task(self._reporter.run(), name="reporter"))
        ends = [
            asyncio.create_task(self._stop.wait(), name="stop"),
            asyncio.create_task(self.replica.core.hopeless.wait(), name="hopeless"),
        ]
        await asyncio.wait([*ends, http, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in (http, *background):
            if task.done() and (error := task.exception()) is not None:
                logger.critical("%s ended: %r", task.get_name(), error, exc_info=error)
        asked = self._stop.is_set()
        await self._take_down(http, [*ends, *background])
        for number in signals:
            loop.remove_signal_handler(number)
        return asked

    async def _take_down(self, http: asyncio.Task[None], tasks: list[asyncio.Task[Any]]) -> None:
        """Requests first, then the core, the last report, the tasks, HTTP, and the journal at the very end."""
        config = self.replica.config
        await self.replica.stop(config.drain_s, hurry=self._hurry)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._reporter is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reporter.report(), LAST_REPORT_S)
        if self._transport is not None:
            await self._transport.close()
        self._http.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(http), HTTP_STOP_S)
        http.cancel()
        await asyncio.gather(http, return_exceptions=True)
        await self.replica.journal.close()


def _admit(admitted: bool) -> None:
    if not admitted:
        raise ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key")


def _answer_error(_: Request[Any, Any, Any], error: ApiError) -> Response[bytes]:
    return Response(error.body(), status_code=error.status, headers=dict(error.headers()))


def _answer_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What the framework itself refuses: unknown addresses and methods."""
    if error.status_code == 405:
        return _answer_error(
            request, ApiError(405, "this address does not take this method", code="method_not_allowed")
        )
    if error.status_code == 404:
        return _answer_error(request, ApiError(404, "there is nothing at this address", code="not_found"))
    return _answer_error(request, ApiError(error.status_code, error.detail, code="invalid_request"))


def _answer_defect(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    logger.exception("a request failed in the replica's front", exc_info=error)
    return _answer_error(request, ApiError(500, "the replica failed to answer this request", code="internal_error"))
