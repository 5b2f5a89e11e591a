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
from typing import NamedTuple

import msgspec

from controlplane.admission.calibration import Calibration
from controlplane.evidence import Evidence, EvidenceKind
from controlplane.layers import Layer
from dataplane.hardware.geometry import StepSize
from dataplane.protocol import Counters

LEAST_WINDOWS = 3


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


class Modelled(NamedTuple):
    """What the step model says of a request, in seconds: `wait` is the longest of `queued` (the prefill of those
    before), `slot` and `room` (until a slot and KV room are free).
    """

    queued: float
    slot: float
    room: float
    prefill: float

    @property
    def wait(self) -> float:
        return max(self.queued, self.slot, self.room)

    @property
    def total(self) -> float:
        return self.wait + self.prefill


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """What a prediction was made of, but for the prompt."""

    cost: StepCost
    load: PoolLoad
    ahead: Ahead
    output: int

    def modelled(self, uncached: int, cached: int) -> Modelled:
        """Of a prompt of so many tokens."""
        cost, load, ahead = self.cost, self.load, self.ahead
        before = (ahead.uncached / load.replicas, ahead.cached / load.replicas)
        wanted = ahead.tokens + uncached + cached + self.output - (load.tokens - load.held)
        return Modelled(
            queued=_prefill_s(cost, load, ahead.requests / load.replicas, before),
            slot=_until(ahead.requests + 1 - (load.slots - load.running), load.running, load.hold_s),
            room=_until(wanted, load.held, load.hold_s),
            prefill=cost.fixed + _prefill_s(cost, load, 1.0, (uncached, cached)),
        )


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """`ttft` from now, in seconds, and its parts `wait_s` and `prefill_s`. `work_s` is what the request takes of the
    pool before its first token: who comes after it waits so much longer. `layer` is where it waits: for KV room or for
    its turn. `modelled_s` is what the step model said before calibration, of what is in `basis`.
    """

    ttft: Evidence
    wait_s: float
    prefill_s: float
    work_s: float
    modelled_s: float
    layer: Layer
    basis: Basis | None = None

    def modelled_of(self, uncached: int, cached: int) -> float:
        """What the step model says of the prompt that the engine has counted, with all else as it was foreseen: what
        calibration compares with, so that a wrong guess of the size is no slowness of the pool.
        """
        if self.basis is None:
            return self.modelled_s
        return self.basis.modelled(uncached, cached).total


def predict(
    cost: StepCost, load: PoolLoad, ahead: Ahead, calibration: Calibration, *, uncached: int, cached: int, output: int
) -> Prediction:
    """The TTFT of a prompt of `uncached` and `cached` tokens that stands behind `ahead`.

    Raises ValueError for a pool without replicas: there is nothing to predict.
    """
    if load.replicas < 1:
        raise ValueError("a pool without replicas has no TTFT")
    basis = Basis(cost=cost, load=load, ahead=ahead, output=output)
    modelled = basis.modelled(uncached, cached)
    for_credit = max(modelled.slot, modelled.room)
    ratio = calibration.ratio(uncached, cached)
    ttft = Evidence(
        value=modelled.total * ratio.value,
        unit="s",
        kind=EvidenceKind.CALIBRATED,
        source=f"step model {cost.source} (n={cost.n}); calibration of pool {calibration.pool}: "
        f"×{ratio.value:.3g} (n={ratio.n})",
        n=ratio.n,
        error=math.expm1(ratio.deviation),
    )
    work = modelled.prefill / load.replicas if modelled.queued >= for_credit else load.hold_s / max(1, load.running)
    return Prediction(
        ttft=ttft,
        wait_s=modelled.wait * ratio.value,
        prefill_s=modelled.prefill * ratio.value,
        work_s=work * ratio.value,
        modelled_s=modelled.total,
        layer=Layer.MEMORY if modelled.room > max(modelled.queued, modelled.slot) else Layer.SCHEDULING,
        basis=basis,
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
