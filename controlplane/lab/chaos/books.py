"""The two sides that must agree: the ledger through the admin API, and the limits' counters in the store.

Layer: service. It reads and changes nothing.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from urllib.parse import urlencode

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admission.charges import SIZES, Counter, Use, charges_for
from controlplane.admission.leases import Leases
from controlplane.db import create_engine
from controlplane.gateway.quotas import TenantLimits
from controlplane.lab.chaos.checks import Row, Standing, Tokens
from controlplane.quotas.service import load_quotas
from controlplane.redis_client import create_redis
from controlplane.settings import Settings
from controlplane.tenants.admin_client import AdminClient
from dataplane.protocol import UsageRecord

MARGIN_S = 600.0
"""Clocks are stepped meanwhile."""
DEADLINE_S = 5.0


def ledger(admin: AdminClient, since: float) -> dict[str, Row]:
    """Every attempt that has finished since, by its id, as exported. Raises AdminApiError."""
    span = {"since": _iso(since - MARGIN_S), "until": _iso(time.time() + MARGIN_S), "format": "csv"}
    text = bytearray()
    admin.download(f"/usage/export?{urlencode(span)}", text.extend)
    return {
        line["attempt_id"]: Row(line["basis"], int(line["prompt_tokens"]), int(line["output_tokens"]))
        for line in csv.DictReader(io.StringIO(text.decode()))
    }


def engines(records: Iterable[UsageRecord]) -> dict[str, Tokens]:
    """What the engines have counted, by attempt."""
    return {record.attempt_id: Tokens(record.prompt_tokens, record.output_tokens) for record in records}


async def standings(settings: Settings) -> list[Standing]:
    """Where every tenant's limits stand now. Raises what a store that is away raises."""
    engine, redis = create_engine(settings, pooled=False), create_redis(settings.redis_url)
    leases = Leases(redis, deadline_s=DEADLINE_S)
    try:
        async with AsyncSession(engine) as session:
            tenants = await load_quotas(session)
        found = []
        for quotas in tenants:
            windows = TenantLimits(quotas).windows(time.time())
            counted = [limit for limit in quotas.limits if limit.kind not in SIZES]
            for limit in counted:
                (charge,) = charges_for(quotas.tenant_id, [limit], Use(requests=0), windows)
                answer = await leases.standings(quotas.tenant_id, [charge])
                if isinstance(answer, tuple):
                    name = f"{limit.kind.value} of {quotas.tenant_id[:8]}"
                    found.append(Standing(name, answer[0].used, limit.hard, charge.counter is Counter.HELD))
        return found
    finally:
        await leases.close()
        await redis.aclose()
        await engine.dispose()


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
