"""Where reports come in, and the Overview as an API.

Layer: service. Parses and answers. The internal routes are guarded by the application (internal token) and speak
msgpack: a body is read within the application's limit, decoded against the wire structs, and queued.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, Response, Router, get, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.component import Resources
from controlplane.egress import TargetRefusedError
from controlplane.errors import InvalidRequestError
from controlplane.fleet.addresses import ReplicaAddresses
from controlplane.telemetry import overview as pages
from controlplane.telemetry.ingest import Ingestor
from controlplane.telemetry.intake import Incoming
from controlplane.telemetry.metrics import Refusal
from controlplane.telemetry.schemas import Overview
from controlplane.telemetry.windows import ENGINE, GATEWAY
from dataplane.protocol import GatewayReport, Report, encode

MSGPACK = "application/msgpack"

_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    ENGINE: msgspec.msgpack.Decoder(Report),
    GATEWAY: msgspec.msgpack.Decoder(GatewayReport),
}


@post("/internal/v1/reports", status_code=200, operation_id="takeReport", include_in_schema=False)
async def take_report(request: Request[Any, Any, Any], state: State) -> Response[bytes]:
    """A replica's `Report`, answered by `ReportAck` once it is committed."""
    return await _take(request, state.ingestor, ENGINE, state.replica_addresses)


@post("/internal/v1/gateway-reports", status_code=200, operation_id="takeGatewayReport", include_in_schema=False)
async def take_gateway_report(request: Request[Any, Any, Any], state: State) -> Response[bytes]:
    """A gateway's `GatewayReport`, answered by `ReportAck` once it is committed."""
    return await _take(request, state.ingestor, GATEWAY)


async def _take(
    request: Request[Any, Any, Any], ingestor: Ingestor, source: str, addresses: ReplicaAddresses | None = None
) -> Response[bytes]:
    body = await request.body()
    try:
        report: Incoming = _decoders[source].decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        ingestor.refused(source, Refusal.UNREADABLE)
        raise InvalidRequestError(f"this is not a readable report: {error}", code="report_unreadable") from None
    if addresses is not None and isinstance(report, Report):
        try:
            await addresses.require(report.url)
        except TargetRefusedError as error:
            ingestor.refused(source, Refusal.ADDRESS)
            raise InvalidRequestError(
                f"the replica's url is refused: {error}", code="replica_address_refused", param="url"
            ) from None
    ack = await ingestor.submit(report, len(body))
    return Response(encode(ack), media_type=MSGPACK)


class TelemetryController(Controller):
    """What the gateways and engines measured."""

    tags = ["telemetry"]  # noqa: RUF012 - the framework's own attribute

    @get("/overview", operation_id="getOverview", summary="Figures of the last minutes, with their evidence")
    async def overview(
        self,
        session: NamedDependency[AsyncSession],
        resources: NamedDependency[Resources],
        window_s: Annotated[
            int,
            QueryParameter(ge=pages.SHORTEST_S, le=pages.LONGEST_S, description="seconds, a multiple of 10"),
        ] = 300,
        tenant: FromQuery[str | None] = None,
        replica: FromQuery[str | None] = None,
    ) -> Overview:
        return await pages.overview(
            session, resources.redis, now=time.time(), window_s=window_s, tenant=tenant, replica=replica
        )


api = Router("/api/v1", route_handlers=[TelemetryController])
