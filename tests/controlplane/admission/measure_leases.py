"""How many requests' leases a second one process takes and settles, with six counters each. Not a test.

`python -m tests.controlplane.admission.measure_leases [seconds]` starts a Valkey of its own. Calls and CPU are of this
process; the store works on another core if there is one.
"""

from __future__ import annotations

import asyncio
import sys
import time

from controlplane.admission.answers import Cold, Granted
from controlplane.admission.charges import Charge, Use, charges_for
from controlplane.admission.leases import Leases
from controlplane.quotas.schemas import QuotaLevel
from controlplane.redis_client import create_redis
from controlplane.settings import Secret
from tests.controlplane.admission.leasing import CONCURRENT, DAILY, MONEY, OUT, RPM, TENANT, TPM, limit, windows_at
from tests.services import valkey_server

MUCH = 1 << 49
LIMITS = [
    limit(RPM, MUCH),
    limit(TPM, MUCH),
    limit(OUT, MUCH, level=QuotaLevel.PROJECT, scope_id="p1"),
    limit(CONCURRENT, MUCH),
    limit(DAILY, MUCH),
    limit(MONEY, MUCH),
]
USE = Use(input=500, uncached_input=500, output=200, money=90)


def charges() -> tuple[Charge, ...]:
    return charges_for(TENANT, LIMITS, USE, windows_at(time.time()))


async def measure(url: str, together: int, seconds: float) -> str:
    redis = create_redis(Secret(url))
    leases = Leases(redis, deadline_s=10.0)
    cold = await leases.acquire(TENANT, "first", charges())
    for counter in cold.counters if isinstance(cold, Cold) else ():
        await leases.hydrate(TENANT, counter, 0, complete_until=cold.now)
    ends, done, waits = time.monotonic() + seconds, 0, []

    async def serve(worker: int) -> None:
        nonlocal done
        number = 0
        while time.monotonic() < ends:
            number += 1
            began = time.perf_counter()
            granted = await leases.acquire(TENANT, f"{together}-{worker}-{number}", charges())
            waits.append(time.perf_counter() - began)
            assert isinstance(granted, Granted)
            await leases.settle(granted.lease, USE)
            done += 1

    cpu = time.process_time()
    await asyncio.gather(*(serve(worker) for worker in range(together)))
    cpu = time.process_time() - cpu
    store = await redis.info("commandstats")
    await redis.aclose()
    waits.sort()
    script_us = store["cmdstat_evalsha"]["usec_per_call"]
    return (
        f"{together:3} together: {done / seconds:6.0f} requests/s ({2 * done / seconds:.0f} calls/s), "
        f"{cpu / done * 1e6:4.0f} µs CPU a request, acquire p50 {waits[len(waits) // 2] * 1e3:.2f} ms, "
        f"{script_us:.0f} µs in the store a call"
    )


if __name__ == "__main__":
    with valkey_server(None) as url:
        for together in (1, 16, 64):
            print(asyncio.run(measure(url, together, float(sys.argv[1]) if len(sys.argv) > 1 else 3.0)))
