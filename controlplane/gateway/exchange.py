"""One inference request, from its key to its last byte.

Layer: service. Authenticated → read → leased → in turn → routed → relayed → settled. Whatever happens in between, the
lease is settled once, the replica's slot is given back, the upstream connection is closed, and the record ends in
exactly one outcome.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
import time

from litestar.types import Receive, Send

from controlplane.admission.charges import NOTHING, Use
from controlplane.admission.retry import Asker
from controlplane.errors import NotFoundError, PermissionDeniedError, TidegateError, UpstreamError
from controlplane.gateway.asgi import RequestHead, discard_body, read_body, respond_error
from controlplane.gateway.body import InferenceBody, read_inference_body
from controlplane.gateway.departure import Departure
from controlplane.gateway.errors import ClientGoneError, UpstreamTimeoutError, capacity
from controlplane.gateway.gateway import Gateway
from controlplane.gateway.metering import Counted, Held
from controlplane.gateway.record import Outcome, RequestRecord
from controlplane.gateway.relay import Relay
from controlplane.gateway.replica_headers import replica_headers
from controlplane.gateway.turns import Turn
from controlplane.gateway.upstream import Cause, UpstreamFailure
from controlplane.gateway.usage import usage_record
from controlplane.gateway.wishes import Wish, read_wish
from controlplane.routing.candidates import Candidate, RoutingSnapshot
from controlplane.routing.router import decide
from controlplane.tenants.schemas import KeyGrant, Scope
from dataplane.protocol import HEADER_REQUEST

ATTEMPTS = 2
STATUS_CLIENT_GONE = 499
"""What the log says of a client that left."""

UPSTREAM_PREFIX = "/v1"

RETRYABLE = frozenset({Cause.UNREACHABLE, Cause.REFUSED, Cause.RESET, Cause.UNAVAILABLE})
"""Failures before any byte of an answer that another replica may make good."""

SUSPICIOUS = frozenset({Cause.UNREACHABLE, Cause.REFUSED, Cause.RESET})
"""Failures that speak against the replica until its next report. What a client did wrong never does (F18)."""

logger = logging.getLogger("tidegate.gateway")


class _Work(enum.Enum):
    """What a replica may have done for the request."""

    NONE = enum.auto()
    """It was sent to none, or none could take it."""
    REFUSED = enum.auto()
    """A replica has read and refused it."""
    TAKEN = enum.auto()


class Exchange:
    """Serves one request of `grant` on `path` (below /v1). `arrived` is on the monotonic clock."""

    def __init__(self, gateway: Gateway, grant: KeyGrant, path: str, request_id: str, arrived: float) -> None:
        self._gateway = gateway
        self._grant = grant
        self._path = path
        self._relay: Relay | None = None
        self._work = _Work.NONE
        self._wish: Wish | None = None
        self._turn: Turn | None = None
        self.record = RequestRecord(request_id=request_id, grant=grant, at=time.time(), accepted=arrived)

    async def serve(self, head: RequestHead, receive: Receive, send: Send) -> None:
        """Answer the request; raises only when the server cancels its own task."""
        record, gateway = self.record, self._gateway
        capture = gateway.prompt_log.begin(self._grant)
        if capture is not None:
            send = capture.tap(send)
        try:
            self._require(Scope.INFERENCE)
            with gateway.slot(Asker(self._grant.identity, head.content_length)):
                with gateway.receiving(self._grant.tenant_id):
                    body, waited = await read_body(head, receive, gateway.settings.max_body_bytes, gateway.bodies)
                record.accepted += waited
                record.at += waited
                if capture is not None:
                    capture.request = body
                request = read_inference_body(body)
                self._allow(request.model)
                self._wish = read_wish(head.wishes, self._grant.priority)
                record.stream = request.stream
                gateway.retries.earn()
                async with Departure(receive, gateway.departures):
                    with gateway.running():
                        await self._metered(request, send)
        except TidegateError as error:
            record.refuse(error)
            await discard_body(head, receive)
            await respond_error(send, error, record.request_id)
        except ClientGoneError:
            record.conclude(Outcome.CANCELLED, "", STATUS_CLIENT_GONE)
        except asyncio.CancelledError:
            if not gateway.cutting:
                raise
            await self._cut(send)
        except Exception:
            logger.exception("Request failed in the gateway", extra={"request_id": record.request_id})
            record.conclude(Outcome.FAILED, "internal_error", 500)
            await self._apologise(send)
        finally:
            record.conclude(Outcome.CANCELLED, "", STATUS_CLIENT_GONE)
            gateway.settle(record)
            if capture is not None:
                gateway.prompt_log.end(capture, record)

    async def _cut(self, send: Send) -> None:
        """The gateway shuts down and the request was at no replica: it is told so, unless it has its answer."""
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        if self.record.outcome is None and (self._relay is None or not self._relay.started):
            error = self._answer_for(UpstreamFailure(Cause.SHUTDOWN))
            await respond_error(send, error, self.record.request_id)

    async def _apologise(self, send: Send) -> None:
        error = TidegateError("The gateway failed to handle this request.")
        if self._relay is None or not self._relay.started:
            await respond_error(send, error, self.record.request_id)
        elif self.record.stream:
            await self._relay.interrupt(UpstreamFailure(Cause.ERROR), error)

    def _require(self, scope: Scope) -> None:
        if scope not in self._grant.scopes:
            raise PermissionDeniedError(f"This API key lacks the scope {scope.value!r}.", code="scope_missing")

    def _allow(self, model: str) -> None:
        """Whether the key may use `model`, and whether there is one.

        A key with a list of models gets 403 for anything else, existing or not, so that it cannot tell other tenants'
        models from none; only a model that the key may use and nobody serves is 404.
        """
        fleet, grant = self._gateway.fleet, self._grant
        shown = model if len(model) <= 100 else f"{model[:100]}…"
        if grant.allowed_models is not None and model not in grant.allowed_models:
            raise PermissionDeniedError(
                f"This API key may not use the model {shown!r}.", code="model_not_allowed", param="model"
            )
        if fleet.view is None:
            raise capacity("The served models are not known yet; try again.", "policy_unavailable")
        if fleet.pool(model) is None:
            raise NotFoundError(
                f"The model {shown!r} does not exist or you do not have access to it.",
                code="model_not_found",
                param="model",
            )
        self.record.model = model

    async def _metered(self, request: InferenceBody, send: Send) -> None:
        """Deliver under a lease when it is the request's turn, and settle it however that ends."""
        meter = self._gateway.meter
        assert self._wish is not None, "wishes are read with the head"
        self._gateway.dispatch.turn_away(self._grant, self._wish, request)
        held = await meter.take(self._grant, request, self._count, arrived_at=self.record.at)
        try:
            await self._in_turn(held, request, send)
        finally:
            await meter.settle(held, self._settled_to(held, request))

    async def _in_turn(self, held: Held, request: InferenceBody, send: Send) -> None:
        assert self._wish is not None, "wishes are read with the head"
        self._turn = await self._gateway.dispatch.admit(self._grant, self._wish, request)
        try:
            await self._deliver(held, request, send)
        finally:
            self._turn.end(self.record, served=self._work is not _Work.NONE)

    async def _count(self, request: InferenceBody) -> int | None:
        """Tokens of the prompts, as a replica counts them; None when none can tell."""
        replica = self._choose(request.model, set())  # it has no turn yet, and so no lane
        if replica is None:
            return None
        url = replica.url + UPSTREAM_PREFIX + self._path
        named = {HEADER_REQUEST: self.record.request_id}
        return await self._gateway.count(self._grant.tenant_id, url, named, request.forward)

    def _settled_to(self, held: Held, request: InferenceBody) -> Use:
        """What was used; all that was reserved when it cannot be told, so that the lease ends either way."""
        try:
            return self._used(held, request)
        except Exception:
            logger.exception("What a request used cannot be told", extra={"request_id": self.record.request_id})
            return held.worst

    def _used(self, held: Held, request: InferenceBody) -> Use:
        """What the lease is settled to; it also goes to the ledger."""
        gateway, record = self._gateway, self.record
        if self._work is _Work.NONE:
            return NOTHING
        if self._work is _Work.REFUSED or self._relay is None:
            return Use(requests=1)
        # Of an answer that was not streamed only the engine knows how much there was when its client left.
        unseen = not record.stream and record.outcome in {Outcome.FINISHED, None}
        relayed = max(self._relay.reading.times.counted, record.output_tokens)
        counted = Counted(usage_told=record.usage_told, relayed=None if unseen and not relayed else relayed)
        bound = (0, 0) if counted.usage_told else gateway.meter.bound(held, request)
        gateway.usage.write(usage_record(record, counted, bound, time.time()))
        return gateway.meter.used(held, record, counted)

    async def _deliver(self, held: Held, request: InferenceBody, send: Send) -> None:
        """Send the request to a replica, to a second one if the first gave no answer at all, and relay the answer."""
        gateway, record = self._gateway, self.record
        tried: set[str] = set()
        failure: UpstreamFailure | None = None
        for attempt in range(ATTEMPTS):
            replica = self._route(request.model, tried)
            if replica is None and failure is not None and failure.cause is Cause.RESET:
                replica = self._route(request.model, set())  # an idle connection closed meanwhile proves nothing
            if replica is None:
                break
            tried.add(replica.replica)
            record.pool, record.replica = replica.pool, replica.replica
            record.attempt_id = f"{random.getrandbits(128):032x}"
            failure = await self._attempt(held, request, replica, send, tried)
            if failure is None:
                return
            retry = failure.cause in RETRYABLE and attempt + 1 < ATTEMPTS and gateway.retries.spend()
            gateway.metrics.upstream_failed(failure.cause, retried=retry)
            if not retry:
                break
        raise self._answer_for(failure)

    async def _attempt(
        self, held: Held, request: InferenceBody, replica: Candidate, send: Send, tried: set[str]
    ) -> UpstreamFailure | None:
        """One replica's turn: None when the client has its answer, else why it has been sent nothing."""
        gateway, record = self._gateway, self.record
        relay = Relay(
            record,
            send,
            hide_usage=request.hide_usage,
            on_first=gateway.recorder.first_tokens,
            headers=held.headers,
        )
        self._relay, self._work = relay, _Work.NONE
        assert self._turn is not None, "nothing is dispatched before its turn"
        self._turn.watch(lambda: relay.reading.times.counted)
        response = None
        gateway.board.begin(replica.replica)
        try:
            url = replica.url + UPSTREAM_PREFIX + self._path
            response = await gateway.post(held.lease, url, self._headers(request), request.forward, self._sent)
            if response.status < 400:
                gateway.recorder.accept(record)
            else:
                self._work = _Work.REFUSED if response.status < 500 else _Work.NONE
            if response.status == 503:
                gateway.board.suspect(replica.replica)
                if len(tried) < ATTEMPTS and gateway.retries.left and self._route(request.model, tried) is not None:
                    return UpstreamFailure(Cause.UNAVAILABLE)
            await relay.relay(response)
        except UpstreamFailure as failure:
            if failure.cause in SUSPICIOUS:
                gateway.board.suspect(replica.replica)
                self._work = _Work.NONE
            return failure
        except asyncio.CancelledError:
            return await self._cancelled(relay)
        finally:
            gateway.board.end(replica.replica)
            if response is not None:
                response.close()
            relay.settle()
        return None

    def _sent(self) -> None:
        self._work = _Work.TAKEN

    async def _cancelled(self, relay: Relay) -> UpstreamFailure | None:
        """The client left (then the cancellation goes on), or the gateway is shutting down (then it is told so)."""
        if relay.reading.done:
            relay.finished(200)
        if relay.reading.done or not self._gateway.cutting:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()  # it goes on, to say so
        failure = UpstreamFailure(Cause.SHUTDOWN)
        if not relay.started:
            return failure
        await relay.interrupt(failure, self._answer_for(failure))
        return None

    def _route(self, model: str, tried: set[str]) -> Candidate | None:
        """A replica of the request's lane while one takes it, else any."""
        assert self._turn is not None, "nothing is routed before its turn"
        closed = self._gateway.dispatch.closed_to(model, self._turn.lane)
        chosen = self._choose(model, tried | closed) if closed else None
        return chosen or self._choose(model, tried)

    def _choose(self, model: str, tried: set[str]) -> Candidate | None:
        gateway = self._gateway
        candidates = gateway.board.candidates(gateway.fleet.replicas(model))
        snapshot = RoutingSnapshot(
            model=model, candidates=candidates, current=gateway.fleet.listening, excluded=frozenset(tried)
        )
        return decide(snapshot, time.time(), gateway.rng).choice

    def _headers(self, request: InferenceBody) -> dict[str, str]:
        assert self._wish is not None, "wishes are read with the head"
        assert self._turn is not None, "nothing is sent before its turn"
        return replica_headers(self._grant, self.record, request, priority=self._wish.priority, tag=self._turn.tag)

    def _answer_for(self, failure: UpstreamFailure | None) -> TidegateError:
        """What the client is told when no replica answered; the record says why."""
        if failure is None:
            return self._gateway.fleet.no_capacity(self.record.model)
        cause = failure.cause
        if cause in RETRYABLE:
            error: TidegateError = capacity("The replica could not be reached; try again.", cause.value)
        elif cause is Cause.SHUTDOWN:
            error = self._gateway.shutting_down()
        elif cause is Cause.TIMEOUT:
            error = UpstreamTimeoutError("The replica did not answer in time.", code=cause.value)
        else:
            error = UpstreamError("The replica failed to answer.", code=cause.value)
        self.record.conclude(Outcome.FAILED, cause.value, error.status)
        return error
