"""Fair dispatch across gateways, on a simulated clock: shares, bounds, floors, and what fairness costs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import median

import pytest

from controlplane.admission.bands import Band
from controlplane.admission.simulation import (
    Simulated,
    SimulatedPool,
    SimulatedRequest,
    Simulation,
    flood,
    price_of_fairness,
)
from tests.factories.fair_server import Watch

POOL = SimulatedPool(replicas=2, gateways=4, slots=16, tokens=8_000, longest=2_000, weights={"a": 1.0, "b": 3.0})
UNTIL = 60.0


def rival_floods(pool: SimulatedPool) -> list[SimulatedRequest]:
    """Two tenants that never stop asking, with unlike lengths, at every gateway."""
    return flood("a", pool, at_once=12, prompt=200, output=60) + flood("b", pool, at_once=12, prompt=90, output=150)


def poisson(tenant: str, per_s: float, rng: random.Random, *, gateways: int, **fields: int) -> list[SimulatedRequest]:
    found, at = [], rng.expovariate(per_s)
    while at < UNTIL:
        found.append(SimulatedRequest(at, tenant, gateway=rng.randrange(gateways), **fields))
        at += rng.expovariate(per_s)
    return found


@pytest.fixture(scope="module")
def by_arrival() -> tuple[Simulated, Watch]:
    """The control: the same floods in the order of arrival."""
    watch = Watch(weights=POOL.weights, everyone=["a", "b"])
    return Simulation(replace(POOL, fair=False), watch).run(rival_floods(POOL), UNTIL), watch


@pytest.mark.parametrize("flush_s", [0.0, 0.05, 0.5])
def test_two_flooding_tenants_get_service_by_weight_and_within_the_bound(
    flush_s: float, by_arrival: tuple[Simulated, Watch]
) -> None:
    """2·(U + S/weight): U from lengths and memory, S from what the four gateways kept back, measured."""
    pool = replace(POOL, flush_s=flush_s)
    watch = Watch(weights=pool.weights, everyone=["a", "b"])
    found = Simulation(pool, watch).run(rival_floods(pool), UNTIL)
    assert found.service["b"] / found.service["a"] == pytest.approx(3.0, rel=0.1)
    u = max(pool.charges.input * 200, pool.charges.output * pool.replicas * pool.tokens)
    assert 0 < watch.apart <= 2 * (u + found.unsent)
    assert watch.apart < 1.5 * watch.apart_by(UNTIL / 2), "it does not grow"
    control, apart = by_arrival
    assert control.service["b"] / control.service["a"] < 2.0, "the order by arrival knows no weights"
    assert apart.apart > 3 * watch.apart
    assert apart.apart > 1.5 * apart.apart_by(UNTIL / 2), "the two come apart for as long as they wait"


def test_it_does_not_matter_at_which_gateway_a_tenant_asks() -> None:
    one = [replace(each, gateway=0) for each in flood("a", POOL, at_once=12, prompt=100, output=100)]
    other = [replace(each, gateway=3) for each in flood("b", POOL, at_once=12, prompt=100, output=100)]
    found = Simulation(POOL).run(one + other, UNTIL)
    assert found.service["b"] / found.service["a"] == pytest.approx(3.0, rel=0.1)


def test_f24_a_polite_tenant_keeps_its_floor_beside_two_floods() -> None:
    rng = random.Random(11)
    polite = poisson("polite", 2.0, rng, gateways=4, prompt=100, output=50)
    alone = Simulation(POOL).run(polite, UNTIL)
    beside = Simulation(POOL).run(polite + rival_floods(POOL), UNTIL)
    assert beside.service["polite"] >= 0.97 * alone.service["polite"], "it asks for less than its part and gets it all"
    control = Simulation(replace(POOL, fair=False)).run(polite + rival_floods(POOL), UNTIL)
    assert median(beside.ttft["polite"]) < 0.6 * median(control.ttft["polite"])


def test_f24_a_low_band_gets_its_floor_under_a_flood_of_an_urgent_one() -> None:
    urgent = [replace(each, band=Band.URGENT) for each in flood("a", POOL, at_once=16, prompt=100, output=100)]
    batch = [replace(each, band=Band.BATCH) for each in flood("b", POOL, at_once=16, prompt=100, output=100)]
    found = Simulation(POOL).run(urgent + batch, UNTIL)
    share = found.service["b"] / sum(found.service.values())
    assert 0.04 < share < 0.08, "its floor is 5 % of the others'"


@pytest.mark.parametrize(("replicas", "budget", "long_chunk"), [(4, 512, 0), (1, 256, 32)])
def test_a_flood_of_the_longest_prompts_leaves_the_ttft_of_short_ones(
    replicas: int, budget: int, long_chunk: int
) -> None:
    """On four replicas the long lane keeps to one; on a single one the engine takes little of a prompt in a step."""
    pool = SimulatedPool(
        replicas=replicas, gateways=4, slots=32, tokens=65_536, longest=32_768, budget=budget, long_chunk=long_chunk
    )
    rng = random.Random(5)
    short = poisson("short", 2.0 * replicas, rng, gateways=4, prompt=400, output=60)
    longest = flood("long", pool, at_once=4, prompt=32_000, output=200)

    def p99(pool: SimulatedPool, requests: list[SimulatedRequest]) -> float:
        ttft = sorted(Simulation(pool).run(requests, UNTIL).ttft.get("short", []))
        if len(ttft) < 0.97 * len(short):
            return math.inf
        return ttft[int(0.99 * len(ttft))]

    unloaded = p99(pool, short)
    assert p99(pool, short + longest) <= 1.5 * unloaded
    assert p99(replace(pool, fair=False), short + longest) > 5 * unloaded, "without lanes it stands behind them"


def test_the_price_of_fairness_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    price = price_of_fairness(POOL, rival_floods(POOL), UNTIL)
    print(price.sentence())
    assert "tokens/s" in capsys.readouterr().out
    assert abs(price.price) < 0.25
    alone = flood("a", POOL, at_once=12, prompt=200, output=60)
    control = price_of_fairness(POOL, alone, UNTIL)
    assert abs(control.price) < 0.01, "with one tenant there is nobody to be fair to"
