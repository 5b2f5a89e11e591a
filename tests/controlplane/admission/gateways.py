"""One process of several that take leases at the same store: `python -m tests.controlplane.admission.gateways`.

Reads a JSON line of orders from stdin, prints "ready", waits for the next line, works, and prints what it did as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from controlplane.admission.answers import Granted
from controlplane.admission.charges import Use, charges_for
from controlplane.admission.leases import Leases
from controlplane.quotas.schemas import QuotaKind
from controlplane.redis_client import create_redis
from controlplane.settings import Secret
from tests.controlplane.admission.leasing import TENANT, limit, windows_at

ROOT = Path(__file__).parents[3]


async def work(orders: dict[str, Any]) -> dict[str, Any]:
    """Ask `requests` times, `together` at a time, and hold what is granted for `hold_s`. Answers when each grant was
    asked for and answered, and when its slot was about to be given back, Unix seconds.
    """
    redis = create_redis(Secret(orders["url"]))
    leases = Leases(redis, deadline_s=60.0)
    limits = [limit(QuotaKind(kind), hard) for kind, hard in orders["limits"].items()]
    charges = charges_for(TENANT, limits, Use(input=orders["tokens"]), windows_at(time.time()))
    grants: list[tuple[float, float, float]] = []
    unanswered = 0
    numbers = iter(range(orders["requests"]))

    async def ask() -> None:
        nonlocal unanswered
        for number in numbers:
            before = time.time()
            outcome = await leases.acquire(TENANT, f"{os.getpid()}-{number}", charges)
            after = time.time()
            if not isinstance(outcome, Granted):
                continue
            unanswered += outcome.lease.basis != "store"
            if orders["hold_s"] is not None:
                await asyncio.sleep(orders["hold_s"])
                grants.append((before, after, time.time()))
                await leases.settle(outcome.lease, Use(input=orders["tokens"]))
            else:
                grants.append((before, after, after))

    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(ask() for _ in range(orders["together"])))
    await leases.close()
    await redis.aclose()
    return {"grants": grants, "unanswered": unanswered, "away": leases.tally.not_answered}


def run_gateways(count: int, orders: dict[str, Any]) -> list[dict[str, Any]]:
    """What `count` processes did that began together."""
    with ExitStack() as stack:
        started = [stack.enter_context(_start()) for _ in range(count)]
        try:
            _tell(started, json.dumps(orders))
            for process in started:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            _tell(started, "go")
            return [json.loads(process.communicate(timeout=240)[0]) for process in started]
        finally:
            for process in started:
                process.kill()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.controlplane.admission.gateways"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def _tell(processes: Iterable[subprocess.Popen[str]], line: str) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(work(json.loads(sys.stdin.readline())))))
