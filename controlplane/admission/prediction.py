"""When a request's first token may be expected.

Layer: scheduling. Pure. TTFT = wait + own prefill (DOMAIN 3.3). The wait is the longer of two things that go on side by
side: the prefill of what stands before, and the time until enough requests have ended to make room. Cost comes from the
pool's step model (t = a + b·tokens + c·pairs + d·context + e·rows, of `dataplane.hardware.stepmodel`, taken as data);
tokens that the cache holds cost no computation but their attention and their loading. What the model misses, the
pool's calibration knows: the ratio of observed to predicted, apart for prompts mostly computed and mostly cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from controlplane.evidence import Evidence, EvidenceKind
from controlplane.layers import Layer
from dataplane.hardware.geometry import StepSize
from dataplane.protocol import Counters

REMEMBERED = 64
"""Observations that a ratio looks back on."""
LEAST_WINDOWS = 3
RATIO_BOUNDS = (0.05, 20.0)
"""What lies outside is no correction but a mistake: it is excluded."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted step model as data: seconds for a step, and for each token, pair, key read and sampled row in it.

    `loaded` is for a cached token that must be brought in, `fixed` once for a request. `source` names the fit, `n` the
    steps behind it.
    """

    step: float
    tokens: float
    pairs: float = 0.0
    context: float = 0.0
    rows: float = 0.0
    loaded: float = 0.0
    fixed: float = 0.0
    source: str
    n: int

    @classmethod
    def of(cls, coefficients: Mapping[str, float], *, source: str, n: int) -> StepCost:
        """From a step model's coefficients by feature. Raises ValueError for one that is no cost, by name."""
        for name, value in coefficients.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"the step model's {name} must be a cost of at least 0 seconds, got {value!r}")
        return msgspec.convert({**coefficients, "source": source, "n": n}, cls)

    def seconds(self, size: StepSize, steps: float) -> float:
        """Of `steps` steps that compute `size` together."""
        return (
            self.step * steps
            + self.tokens * size.tokens
            + self.pairs * size.pairs
            + self.context * size.context
            + self.rows * size.rows
        )


def fit_cost(windows: Iterable[Counters], source: str) -> StepCost | None:
    """A step's and a token's cost from what replicas reported of their steps; None with too little to tell.

    Least squares on relative errors of step time over windows, neither coefficient negative, like the step model's own
    fit. Windows in which every step had as many tokens cannot tell the two apart: then tokens bear all of it. A window
    that makes no sense is left out (F22).
    """
    rows = []
    steps = 0
    for window in windows:
        scheduled, runtime = window.scheduling, window.runtime
        seconds = (
            runtime.schedule_s + runtime.prepare_s + runtime.launch_s + runtime.forward_s + runtime.sync_s
            + runtime.sample_s + runtime.post_s
        )  # fmt: skip
        if scheduled.steps > 0 and scheduled.tokens_scheduled > 0 and 0 < seconds < math.inf:
            rows.append((scheduled.steps / seconds, scheduled.tokens_scheduled / seconds))
            steps += scheduled.steps
    if len(rows) < LEAST_WINDOWS:
        return None
    uu, uv, vv = (sum(u * u for u, _ in rows), sum(u * v for u, v in rows), sum(v * v for _, v in rows))
    su, sv = sum(u for u, _ in rows), sum(v for _, v in rows)
    apart = uu * vv - uv * uv
    step = (su * vv - sv * uv) / apart if apart > 1e-9 * uu * vv else 0.0
    token = (sv - step * uv) / vv
    if step <= 0 or token < 0:
        step, token = (0.0, sv / vv) if step <= 0 else (su / uu, 0.0)
    return StepCost(step=step, tokens=token, source=source, n=steps)


class PoolLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as last reported, all its `replicas` together. `budget` is the tokens of one replica's step; `held` the KV
    tokens taken of `tokens`; `hold_s` how long a request holds its slot on average.
    """

    replicas: int
    slots: int
    running: int
    tokens: int
    held: int
    budget: int
    hold_s: float


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be dispatched or prefilled before: requests, their prompts' tokens, and the KV they will hold."""

    requests: int = 0
    uncached: int = 0
    cached: int = 0
    tokens: int = 0


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Observed over predicted, as the mean of its logarithm and the mean absolute deviation of that."""

    log: float = 0.0
    deviation: float = 0.0
    n: int = 0

    @property
    def value(self) -> float:
        return math.exp(self.log)

    def with_one(self, ratio: float) -> Ratio:
        """The latest REMEMBERED weigh in, the newer the more once there are so many."""
        share = 1.0 / min(self.n + 1, REMEMBERED)
        off = math.log(ratio) - self.log
        deviation = self.deviation + share * (abs(off) - self.deviation) if self.n else 0.0
        return Ratio(log=self.log + share * off, deviation=deviation, n=self.n + 1)


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's ratios, for prompts of which most is computed and of which most is cached."""

    pool: str
    computed: Ratio = Ratio()
    cached: Ratio = Ratio()

    def ratio(self, uncached: int, cached: int) -> Ratio:
        """The one for such a prompt, or the other while that has seen nothing."""
        mine, other = (self.cached, self.computed) if cached > uncached else (self.computed, self.cached)
        return mine if mine.n or not other.n else other

    def observed(self, predicted_s: float, observed_s: float, *, uncached: int, cached: int) -> Calibration:
        """With one more request. `predicted_s` is `Prediction.modelled_s`; what makes no sense is left out (F22)."""
        if not (0 < predicted_s < math.inf and 0 < observed_s < math.inf):
            return self
        ratio = observed_s / predicted_s
        if not RATIO_BOUNDS[0] <= ratio <= RATIO_BOUNDS[1]:
            return self
        if cached > uncached:
            return msgspec.structs.replace(self, cached=self.cached.with_one(ratio))
        return msgspec.structs.replace(self, computed=self.computed.with_one(ratio))


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """`ttft` from now, in seconds, and its parts `wait_s` and `prefill_s`. `work_s` is what the request takes of the
    pool before its first token: who comes after it waits so much longer. `layer` is where it waits: for KV room or for
    its turn. `modelled_s` is what the step model said before calibration.
    """

    ttft: Evidence
    wait_s: float
    prefill_s: float
    work_s: float
    modelled_s: float
    layer: Layer


def predict(
    cost: StepCost, load: PoolLoad, ahead: Ahead, calibration: Calibration, *, uncached: int, cached: int, output: int
) -> Prediction:
    """The TTFT of a prompt of `uncached` and `cached` tokens that stands behind `ahead`.

    Raises ValueError for a pool without replicas: there is nothing to predict.
    """
    if load.replicas < 1:
        raise ValueError("a pool without replicas has no TTFT")
    before = (ahead.uncached / load.replicas, ahead.cached / load.replicas)
    queued = _prefill_s(cost, load, ahead.requests / load.replicas, before)
    prefill = cost.fixed + _prefill_s(cost, load, 1.0, (uncached, cached))
    for_slot = _until(ahead.requests + 1 - (load.slots - load.running), load.running, load.hold_s)
    wanted = ahead.tokens + uncached + cached + output - (load.tokens - load.held)
    for_room = _until(wanted, load.held, load.hold_s)
    for_credit = max(for_slot, for_room)
    wait = max(queued, for_credit)
    modelled = wait + prefill
    ratio = calibration.ratio(uncached, cached)
    ttft = Evidence(
        value=modelled * ratio.value,
        unit="s",
        kind=EvidenceKind.CALIBRATED,
        source=f"step model {cost.source} (n={cost.n}); calibration of pool {calibration.pool}: "
        f"×{ratio.value:.3g} (n={ratio.n})",
        n=ratio.n,
        error=math.expm1(ratio.deviation),
    )
    work = prefill / load.replicas if queued >= for_credit else load.hold_s / max(1, load.running)
    return Prediction(
        ttft=ttft,
        wait_s=wait * ratio.value,
        prefill_s=prefill * ratio.value,
        work_s=work * ratio.value,
        modelled_s=modelled,
        layer=Layer.MEMORY if wait == for_room and for_room > max(queued, for_slot) else Layer.SCHEDULING,
    )


def _prefill_s(cost: StepCost, load: PoolLoad, requests: float, prompt: tuple[float, float]) -> float:
    """One replica's time for the prompts of `requests`, of so many tokens together, beside the decodes that run."""
    uncached, cached = prompt
    if requests <= 0:
        return 0.0
    rows, context = load.running / load.replicas, load.held / load.replicas
    room = max(1.0, load.budget - rows)
    steps = math.ceil(uncached / room) if requests == 1 else uncached / room
    one = StepSize.prefill(math.ceil(uncached / requests), math.ceil(cached / requests))
    chunks = math.ceil(one.tokens / room)  # each chunk reads what was computed before it
    read = chunks * cached / requests + min(room, one.tokens) * chunks * (chunks + 1) / 2
    beside = StepSize(math.ceil(rows * steps), math.ceil(context * steps), math.ceil(context * steps))
    tokens, pairs, read = (math.ceil(count * requests) for count in (one.tokens, one.pairs, read))
    prompts = StepSize(tokens, pairs, read, math.ceil(requests))
    return cost.seconds(prompts + beside, steps) + cost.loaded * cached


def _until(needed: float, held: float, hold_s: float) -> float:
    """Seconds until `needed` of what is `held` were given back, if each holds its part for `hold_s` (Little)."""
    if needed <= 0:
        return 0.0
    return hold_s * needed / held if held > 0 else 0.0
