"""What a replica is told of a request, from the key's grant alone (F23).

Layer: service. Pure. Nothing that the client sent in its own headers is among it.
"""

from __future__ import annotations

from controlplane.gateway.body import InferenceBody
from controlplane.gateway.record import RequestRecord
from controlplane.tenants.schemas import KeyGrant
from dataplane.protocol import (
    HEADER_ARRIVED,
    HEADER_ATTEMPT,
    HEADER_FAIR_TAG,
    HEADER_KEY,
    HEADER_PRIORITY,
    HEADER_PROJECT,
    HEADER_REQUEST,
    HEADER_SALT,
    HEADER_TENANT,
    HEADER_USAGE,
)


def replica_headers(
    grant: KeyGrant, record: RequestRecord, request: InferenceBody, *, priority: int, tag: float
) -> dict[str, str]:
    """The headers of one attempt. `priority` is what the client asked within its grant, `tag` its turn's."""
    headers = {
        HEADER_REQUEST: record.request_id,
        HEADER_ATTEMPT: record.attempt_id,
        HEADER_TENANT: grant.tenant,
        HEADER_PROJECT: grant.project,
        HEADER_KEY: grant.key_id,
        HEADER_SALT: grant.cache_salt,
        HEADER_PRIORITY: str(priority),
        HEADER_FAIR_TAG: repr(tag),
        HEADER_ARRIVED: repr(record.at),
    }
    if request.hide_usage:
        headers[HEADER_USAGE] = "hidden"
    return headers
