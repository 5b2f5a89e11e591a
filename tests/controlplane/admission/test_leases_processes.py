"""One limit holds for all gateway processes together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from redis.asyncio import Redis

from controlplane.admission.charges import MOST
from tests.controlplane.admission.gateways import run_gateways
from tests.controlplane.admission.leasing import CONCURRENT, RPM, TPM

ASKED = 2_400


def orders(url: str, **changes: Any) -> dict[str, Any]:
    return {"url": url, "tokens": 7, "together": 8, "hold_s": None, **changes}


@pytest.mark.parametrize("gateways", [1, 4, 16])
async def test_f1_many_gateways_admit_no_more_than_one_limit(redis: Redis, valkey: str, gateways: int) -> None:
    """No minute above the limit, and none of the limit lost."""
    limits = {RPM.value: MOST, TPM.value: 700 * 7 + 6}
    done = run_gateways(gateways, orders(valkey, limits=limits, requests=ASKED // gateways))
    grants = list(itertools.chain.from_iterable(one["grants"] for one in done))
    assert not any(one["away"] or one["unanswered"] for one in done)
    for end in (after for _, after, _ in grants):
        assert sum(end - 60 < before and after <= end for before, after, _ in grants) <= 700
    assert len(grants) >= 700
    if max(after for _, after, _ in grants) - min(before for before, _, _ in grants) < 60:
        assert len(grants) == 700


@pytest.mark.parametrize("gateways", [1, 4, 16])
async def test_f13_a_cap_on_concurrency_holds_across_processes(redis: Redis, valkey: str, gateways: int) -> None:
    limits = {CONCURRENT.value: 5}
    done = run_gateways(gateways, orders(valkey, limits=limits, requests=ASKED // gateways, hold_s=0.02))
    held = [(after, ended) for one in done for _, after, ended in one["grants"]]
    assert held
    assert max(sum(after <= start < ended for after, ended in held) for start, _ in held) <= 5
    assert await redis.keys("*:concurrent_requests:") == []
