"""Who waits for a model, as its shared queue in Redis says.

Layer: service. Reads a bounded part, changes nothing. Raises RedisError or TimeoutError when Redis does not answer.
"""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from controlplane.admission.bands import LINES, Band
from controlplane.admission.fair_queue import keys_of

MOST_TENANTS = 1_000
"""Of one line, the least served first."""


class LineState(msgspec.Struct, frozen=True, kw_only=True):
    """A model's queue: tenants that wait by band (both lanes together), each tenant's virtual service (charged tokens
    divided by weight) in the line where it has most, and what is taken of its replicas.
    """

    waiting: dict[Band, frozenset[str]]
    served: dict[str, float]
    slots: int
    tokens: int
    requests: int
    gateways: int

    @property
    def tenants(self) -> frozenset[str]:
        """Those that wait in any line."""
        return frozenset().union(*self.waiting.values())


async def read_line(redis: Redis, model: str) -> LineState:
    """The state of `model`'s queue; an empty one where nobody ever asked."""
    keys = keys_of(model)
    meta_key, served_key, requests_key, gateways_key = keys[:4]
    pipeline = redis.pipeline(transaction=False)
    pipeline.hgetall(meta_key)
    pipeline.hlen(requests_key)
    pipeline.zcard(gateways_key)
    pipeline.hscan(served_key, count=MOST_TENANTS)
    for line in range(LINES):
        pipeline.zrange(keys[9 + line], 0, MOST_TENANTS - 1)
    meta, requests, gateways, (_, found), *backlogs = await pipeline.execute()
    numbers = {name.decode(): value for name, value in meta.items()}
    waiting: dict[Band, frozenset[str]] = dict.fromkeys(Band, frozenset())
    for line, names in enumerate(backlogs):
        band = Band(line % len(Band))
        waiting[band] |= {name.decode() for name in names}
    served: dict[str, float] = {}
    for member, value in found.items():
        tenant = member[1:].decode()
        served[tenant] = max(served.get(tenant, 0.0), float(value))
    slots = sum(int(float(numbers.get(f"slots{lane}", 0))) for lane in (0, 1))
    return LineState(
        waiting=waiting,
        served=served,
        slots=slots,
        tokens=sum(int(float(numbers.get(f"tokens{lane}", 0))) for lane in (0, 1)),
        requests=max(0, requests - slots),
        gateways=gateways,
    )
