"""What each pool was asked for and did lately, for planning.

Layer: service. One query over the 10 s rows of a bounded, closed window. It plans nothing.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.telemetry import repository
from controlplane.telemetry.windows import GATEWAY
from dataplane.protocol import WINDOW_SECONDS, Counters, GatewayCounters, Window


class PoolDemand(msgspec.Struct, frozen=True, kw_only=True):
    """`served` is tokens per second by tenant, prompts and outputs, over the whole window; `peak` the most that the
    pool did in any 10 s of it; `steps` what its replicas counted, one entry for each of their windows.
    """

    served: dict[str, float]
    peak: float
    steps: tuple[Counters, ...]


_gateway = msgspec.msgpack.Decoder(GatewayCounters).decode
_engine = msgspec.msgpack.Decoder(Window).decode


async def demand(session: AsyncSession, now: float, window_s: int) -> dict[str, PoolDemand]:
    """By pool, over the `window_s` seconds of whole spans before the open one. One query."""
    end = int(now) // WINDOW_SECONDS * WINDOW_SECONDS
    rows = await repository.windows(session, WINDOW_SECONDS, end - window_s, end)
    served: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    spans: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    steps: dict[str, list[Counters]] = defaultdict(list)
    for key, data in rows:
        if not key.pool:
            continue
        if key.source != GATEWAY:
            steps[key.pool].append(_engine(data).counters)
            continue
        counters = _gateway(data)
        tokens = counters.prompt_tokens + counters.output_tokens
        served[key.pool][key.tenant] += tokens / window_s
        spans[key.pool][key.start] += tokens
    return {
        pool: PoolDemand(
            served=dict(served[pool]),
            peak=max(spans[pool].values(), default=0) / WINDOW_SECONDS,
            steps=tuple(steps[pool]),
        )
        for pool in {*served, *steps}
    }
