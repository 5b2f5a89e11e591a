"""Predicted TTFT: what it is made of, its lineage, and that it finds what happens in the simulated pool."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.admission.calibration import Calibration, Calibrator, Ratio
from controlplane.admission.prediction import Ahead, PoolLoad, Prediction, StepCost, fit_cost, predict
from controlplane.admission.simulation import LLAMA_8B_LIKE, SimulatedPool, SimulatedRequest, Simulation
from controlplane.evidence import EvidenceKind
from controlplane.layers import Layer
from dataplane.protocol import Counters, RuntimeCounters, SchedulingCounters

COST = StepCost(step=0.01, tokens=1e-4, pairs=1e-9, context=1e-8, rows=1e-5, loaded=1e-7, source="fit A", n=400)
IDLE = PoolLoad(replicas=1, slots=16, running=0, tokens=20_000, held=0, budget=512, hold_s=4.0)
BUSY = PoolLoad(replicas=1, slots=16, running=16, tokens=20_000, held=9_000, budget=512, hold_s=4.0)
UNKNOWN = Calibration(pool="p")
NOBODY = Ahead()


def expect(
    load: PoolLoad = IDLE, ahead: Ahead = NOBODY, calibration: Calibration = UNKNOWN, **request: int
) -> Prediction:
    return predict(COST, load, ahead, calibration, **{"uncached": 500, "cached": 0, "output": 100, **request})


def test_on_an_idle_pool_it_is_the_prefill_alone() -> None:
    found = expect(uncached=500)
    pairs = 500 * 501 / 2
    assert found.wait_s == 0
    assert found.ttft.value == pytest.approx(0.01 + 500e-4 + pairs * 1e-9 + 500e-8 + 1e-5)


def test_it_is_calibrated_evidence_with_its_lineage() -> None:
    calibration = Calibration(pool="p", computed=Ratio(log=math.log(2), deviation=0.1, n=30))
    found = expect(calibration=calibration)
    assert found.ttft.kind is EvidenceKind.CALIBRATED
    assert found.ttft.source == "step model fit A (n=400); calibration of pool p: ×2 (n=30)"
    assert (found.ttft.unit, found.ttft.n) == ("s", 30)
    assert found.ttft.value == pytest.approx(2 * found.modelled_s)
    assert found.ttft.error == pytest.approx(math.expm1(0.1))


def test_cached_input_is_cheap_and_not_free() -> None:
    cold, warm, short = expect(uncached=4000), expect(uncached=400, cached=3600), expect(uncached=400)
    assert short.ttft.value < warm.ttft.value < cold.ttft.value / 4


def test_what_stands_before_is_waited_for_and_more_replicas_share_it() -> None:
    ahead = Ahead(requests=10, uncached=10_000, tokens=11_000)
    one = expect(ahead=ahead)
    four = expect(
        load=PoolLoad(replicas=4, slots=64, running=0, tokens=80_000, held=0, budget=512, hold_s=4.0), ahead=ahead
    )
    assert one.wait_s == pytest.approx(20 * 0.01 + 1.0, rel=0.1)
    assert four.wait_s == pytest.approx(one.wait_s / 4, rel=0.1)


def test_a_full_pool_is_waited_for_and_the_layer_says_what_is_short() -> None:
    slots = expect(BUSY, Ahead(requests=7))
    assert slots.wait_s == pytest.approx(8 * 4.0 / 16)
    assert slots.layer is Layer.SCHEDULING
    full = PoolLoad(replicas=1, slots=64, running=16, tokens=20_000, held=20_000, budget=512, hold_s=4.0)
    room = expect(full, uncached=9_000, output=1_000)
    assert room.wait_s == pytest.approx(4.0 * 10_000 / 20_000)
    assert room.layer is Layer.MEMORY


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 20_000), st.integers(0, 8_000), st.integers(1, 8_000))
def test_more_before_it_or_more_of_it_never_makes_it_sooner(requests: int, before: int, cached: int, own: int) -> None:
    ahead = Ahead(requests=requests, uncached=before if requests else 0)
    base = expect(BUSY, ahead, uncached=own, cached=cached).ttft.value
    more = Ahead(requests=requests + 1, uncached=ahead.uncached + 512)
    assert expect(BUSY, more, uncached=own, cached=cached).ttft.value >= base
    assert expect(BUSY, ahead, uncached=own + 512, cached=cached).ttft.value >= base


def test_calibration_compares_with_what_the_engine_counted_not_with_what_was_guessed() -> None:
    """A prompt guessed four times too short is no slow pool."""
    for load, ahead in ((IDLE, NOBODY), (BUSY, Ahead(requests=3, uncached=900))):
        guessed, told = expect(load, ahead, uncached=500), expect(load, ahead, uncached=1500, cached=500)
        assert guessed.modelled_of(1500, 500) == pytest.approx(told.modelled_s)
        assert guessed.modelled_of(500, 0) == pytest.approx(guessed.modelled_s)


def test_a_step_model_is_taken_as_data_and_checked() -> None:
    found = StepCost.of({"step": 0.01, "tokens": 1e-4, "rows": 0.0}, source="fit", n=7)
    assert (found.step, found.tokens, found.rows, found.n) == (0.01, 1e-4, 0.0, 7)
    with pytest.raises(ValueError, match="the step model's tokens must be a cost"):
        StepCost.of({"step": 0.01, "tokens": math.nan}, source="fit", n=7)
    with pytest.raises(ValueError, match="without replicas"):
        expect(PoolLoad(replicas=0, slots=0, running=0, tokens=0, held=0, budget=1, hold_s=0.0))


@pytest.mark.parametrize("before", [0, 1, 4, 12])
def test_it_finds_what_happens_in_a_burst(before: int) -> None:
    """A burst on an idle pool: the last of it waits for the prefill of all the others."""
    pool = SimulatedPool(slots=32, tokens=60_000, call_s=0.0)
    burst = [SimulatedRequest(0.0, "first", 900, 200) for _ in range(before)] + [
        SimulatedRequest(1e-6, "last", 900, 200)
    ]
    ttft = Simulation(pool).run(burst).ttft["last"][0]
    load = PoolLoad(replicas=1, slots=32, running=before, tokens=60_000, held=before * 450, budget=512, hold_s=10.0)
    ahead = Ahead(requests=before, uncached=before * 900, tokens=before * 1_100)
    idle = PoolLoad(replicas=1, slots=32, running=0, tokens=60_000, held=0, budget=512, hold_s=10.0)
    found = predict(
        LLAMA_8B_LIKE, idle if before < 2 else load, ahead, UNKNOWN, uncached=900, cached=0, output=200
    ).ttft.value
    assert found == pytest.approx(ttft, rel=0.25)


def test_a_cost_twice_as_high_is_found_by_calibration() -> None:
    """The model says half of what the pool takes; after a few requests the prediction is right again."""
    rng = random.Random(3)
    calibrator, errors = Calibrator("p"), []
    for second in range(60):
        tokens = rng.randrange(100, 3_000)
        found = predict(COST, IDLE, Ahead(), calibrator.of("acme", second), uncached=tokens, cached=0, output=10)
        observed = 2 * found.modelled_s * rng.uniform(0.95, 1.05)
        errors.append(abs(found.ttft.value / observed - 1))
        calibrator.observed("acme", found.modelled_s, observed, uncached=tokens, cached=0, now=second)
    assert errors[0] > 0.4
    assert median(errors[10:]) < 0.05


def window(steps: int, tokens: int, seconds: float) -> Counters:
    """What a replica reports of its steps."""
    return Counters(
        scheduling=SchedulingCounters(steps=steps, tokens_scheduled=tokens),
        runtime=RuntimeCounters(schedule_s=0.1 * seconds, forward_s=0.9 * seconds, idle_s=5.0),
    )


def test_a_steps_cost_is_found_in_what_replicas_report() -> None:
    rng = random.Random(9)
    sizes = [(rng.randint(50, 200), rng.randint(1_000, 60_000)) for _ in range(30)]
    windows = [
        window(steps, tokens, (0.01 * steps + 1e-4 * tokens) * rng.uniform(0.98, 1.02)) for steps, tokens in sizes
    ]
    found = fit_cost([*windows, window(0, 0, 0.0), window(10, 10, math.nan)], "pool p")
    assert found is not None
    assert found.step == pytest.approx(0.01, rel=0.1)
    assert found.tokens == pytest.approx(1e-4, rel=0.1)
    assert found.n == sum(steps for steps, _ in sizes)


def test_uniform_or_odd_windows_give_no_negative_cost() -> None:
    uniform = fit_cost([window(10, 100, 1.0)] * 5, "p")
    assert uniform is not None
    assert (uniform.step, uniform.tokens) == (0.0, pytest.approx(0.01))
    falling = fit_cost([window(10, 100 * n, 1.0 / n) for n in range(1, 5)], "p")
    assert falling is not None
    assert min(falling.step, falling.tokens) >= 0
    assert fit_cost([window(1, 1, 1.0)] * 2, "p") is None
