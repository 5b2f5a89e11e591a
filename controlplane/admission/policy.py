"""Whether a request is let into the queue, into which lane, and whom it may push out.

Layer: scheduling. Pure: `decide(snapshot, now, rng)`. What would miss its deadline is refused at once, with a wait
after which it should pass; a queue that is full sheds the lowest band first, then what the least was spent on, then
the newest, but never from a tenant that holds no more than its weighted part. It must never take a quota's decision.

In a gateway nothing was spent on who waits: what a replica has begun keeps its turn through a retry, and stands in no
line again (docs/adr/0019), so that `sunk` is 0 there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from random import Random

import msgspec

from controlplane.admission.bands import Band, Lane, lane_of
from controlplane.admission.prediction import Prediction
from controlplane.decision import Decision, Rejection
from controlplane.evidence import EvidenceKind, MixedEvidenceError
from controlplane.layers import Layer

POLICY_VERSION = "deadline-and-share/1"
MAX_RETRY_AFTER_S = 300
PATIENCE_S = 600.0
"""The place in line of a request that has neither a deadline nor an objective: as if its deadline were so far off."""


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one gateway that may wait in each lane, of one tenant in either, and from how many tokens to compute
    a prompt is long.
    """

    short: int = 256
    long: int = 32
    tenant: int = 128
    long_prompt: int = 4096

    def of(self, lane: Lane) -> int:
        return self.long if lane is Lane.LONG else self.short


class Newcomer(msgspec.Struct, frozen=True, kw_only=True):
    """The request to decide on. `deadline_at` is the client's own (Unix seconds). `sunk` counts tokens that were
    computed for it already, in an attempt that failed.
    """

    request_id: str
    tenant: str
    band: Band
    uncached: int
    cached: int
    arrived_at: float
    deadline_at: float | None = None
    sunk: int = 0


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits here and was not dispatched."""

    request_id: str
    tenant: str
    lane: Lane
    band: Band
    arrived_at: float
    sunk: int = 0


class AdmissionSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All inputs of one decision. `objective_s` is the TTFT objective of the request's class, None without one.
    `prediction` is None when the pool's speed is not known: then nothing is refused for being late. Until
    `promised_until` the pool's time was promised to requests that were refused before (Unix seconds).
    """

    pool: str
    request: Newcomer
    queued: tuple[Queued, ...] = ()
    limits: QueueLimits = QueueLimits()
    weights: Mapping[str, float] = {}
    objective_s: float | None = None
    prediction: Prediction | None = None
    promised_until: float = 0.0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """`retry_after_s` is an estimate in whole seconds; None says that trying again cannot help."""

    code: str
    layer: Layer
    message: str
    retry_after_s: int | None


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What to do: queue the request in `lane` with `deadline_at` (Unix seconds) after shedding `shed`, or refuse it.

    `promised_until` goes into the next snapshot, so that those refused come back one after another.
    """

    lane: Lane
    deadline_at: float
    refusal: Refusal | None = None
    shed: tuple[str, ...] = ()
    promised_until: float = 0.0


def decide(snapshot: AdmissionSnapshot, now: float, rng: Random) -> Decision[Admission]:
    """Let in, or refuse with a reason. It draws nothing from `rng`, which is part of every policy's signature.

    Raises MixedEvidenceError for a prediction that is not calibrated.
    """
    prediction = snapshot.prediction
    if prediction is not None and prediction.ttft.kind is not EvidenceKind.CALIBRATED:
        raise MixedEvidenceError(f"a predicted TTFT is calibrated evidence, not {prediction.ttft.kind}")
    lane = lane_of(snapshot.request.uncached, snapshot.limits.long_prompt)
    late = _too_late(snapshot, now)
    if late is not None:
        return _refuse(snapshot, lane, now, late)
    waiting = [each for each in snapshot.queued if each.lane is lane]
    own = [each for each in waiting if each.tenant == snapshot.request.tenant]
    if len(own) >= snapshot.limits.tenant:
        worst = _worst(snapshot, lane, own)
        if worst is None:
            return _refuse(snapshot, lane, now, _full(snapshot, lane, now, of_tenant=True))
        return _admit(snapshot, lane, (worst,), [f"its tenant's part of the lane is full: {worst.request_id} goes"])
    if len(waiting) < snapshot.limits.of(lane):
        return _admit(snapshot, lane, (), _on_time(snapshot, now))
    victim = _victim(snapshot, lane, waiting)
    if victim is None:
        return _refuse(snapshot, lane, now, _full(snapshot, lane, now))
    reason = f"the {lane.name.lower()} lane is full: it goes before {victim.request_id} ({victim.band.name.lower()})"
    return _admit(snapshot, lane, (victim,), [reason])


def deadline_of(snapshot: AdmissionSnapshot) -> float:
    """The client's deadline or the class's objective, whichever is earlier."""
    request = snapshot.request
    objective = PATIENCE_S if snapshot.objective_s is None else snapshot.objective_s
    own = math.inf if request.deadline_at is None else request.deadline_at
    return min(own, request.arrived_at + objective)


def _too_late(snapshot: AdmissionSnapshot, now: float) -> Refusal | None:
    """A refusal when the first token would come after the deadline.

    Where nobody waits, a class's objective refuses nothing: the pool cannot do better, and late is better than never.
    """
    prediction = snapshot.prediction
    room = deadline_of(snapshot) - now
    if snapshot.request.deadline_at is not None:
        hopeless = _hopeless(snapshot.request.deadline_at - now, prediction)
        if hopeless is not None:
            return hopeless
    elif snapshot.objective_s is None or (prediction is not None and prediction.prefill_s > snapshot.objective_s):
        return None
    if prediction is None or prediction.wait_s <= 0 or prediction.ttft.value <= room:
        return None
    return Refusal(
        code="deadline_unreachable",
        layer=prediction.layer,
        message=f"The first token is expected in {prediction.ttft.value:.3g} s and of use for {max(room, 0.0):.3g} s.",
        retry_after_s=_retry_after(snapshot, now, prediction.ttft.value - room),
    )


def _hopeless(left: float, prediction: Prediction | None) -> Refusal | None:
    """A refusal for good when the client's deadline, in `left` seconds, cannot be met by an idle pool either."""
    if left <= 0:
        return _never("deadline_passed", f"The deadline was {-left:.3g} s ago.")
    if prediction is not None and prediction.prefill_s > left:
        return _never(
            "deadline_impossible",
            f"Even when nobody waits the first token takes {prediction.prefill_s:.3g} s; {left:.3g} s are left.",
        )
    return None


def _never(code: str, message: str) -> Refusal:
    return Refusal(code=code, layer=Layer.SCHEDULING, message=message, retry_after_s=None)


def _full(snapshot: AdmissionSnapshot, lane: Lane, now: float, *, of_tenant: bool = False) -> Refusal:
    wait = snapshot.prediction.wait_s / 2 if snapshot.prediction is not None else 1.0
    return full(snapshot.limits, lane, _retry_after(snapshot, now, wait), of_tenant=of_tenant)


def full(limits: QueueLimits, lane: Lane, retry_after_s: int, *, of_tenant: bool) -> Refusal:
    """The refusal where as many wait as `limits` say."""
    return Refusal(
        code="tenant_queue_full" if of_tenant else "queue_full",
        layer=Layer.SCHEDULING,
        message=f"{limits.tenant} of your requests wait already."
        if of_tenant
        else f"{limits.of(lane)} requests wait in the {lane.name.lower()} lane of this pool.",
        retry_after_s=retry_after_s,
    )


def _retry_after(snapshot: AdmissionSnapshot, now: float, wait: float) -> int:
    """Whole seconds after which room should have come, behind those that were told to come back before."""
    error = snapshot.prediction.ttft.error if snapshot.prediction is not None else 0.0
    at = max(now + wait * (1 + error), snapshot.promised_until)
    return max(1, min(MAX_RETRY_AFTER_S, math.ceil(at - now)))


def _queued(snapshot: AdmissionSnapshot, lane: Lane) -> Queued:
    request = snapshot.request
    return Queued(
        request_id=request.request_id,
        tenant=request.tenant,
        lane=lane,
        band=request.band,
        arrived_at=request.arrived_at,
        sunk=request.sunk,
    )


def _rank(each: Queued) -> tuple[int, int, float, str]:
    """Whoever has the highest goes first when somebody must leave."""
    return (each.band, -each.sunk, each.arrived_at, each.request_id)


def _worst(snapshot: AdmissionSnapshot, lane: Lane, own: list[Queued]) -> Queued | None:
    """Which of its tenant's requests must leave for the newcomer; None when it is the newcomer itself."""
    mine = _queued(snapshot, lane)
    worst = max([*own, mine], key=_rank)
    return None if worst is mine else worst


def _victim(snapshot: AdmissionSnapshot, lane: Lane, waiting: list[Queued]) -> Queued | None:
    """Who must leave for the newcomer; None when it is the newcomer itself."""
    mine = _queued(snapshot, lane)
    everyone = [*waiting, mine]
    counts = Counter(each.tenant for each in everyone)
    total = sum(snapshot.weights.get(tenant, 1.0) for tenant in counts)
    places = snapshot.limits.of(lane)
    above = {tenant for tenant, count in counts.items() if count > places * snapshot.weights.get(tenant, 1.0) / total}
    victim = max((each for each in everyone if each.tenant in above), key=_rank)
    return None if victim is mine else victim


def _on_time(snapshot: AdmissionSnapshot, now: float) -> list[str]:
    if snapshot.prediction is None:
        return ["there is room, and the pool's speed is not known"]
    found = snapshot.prediction.ttft
    return [f"the first token is expected in {found.value:.3g} s, of use for {deadline_of(snapshot) - now:.3g} s"]


def _admit(
    snapshot: AdmissionSnapshot, lane: Lane, victims: tuple[Queued, ...], reasons: list[str]
) -> Decision[Admission]:
    return Decision(
        choice=Admission(
            lane=lane,
            deadline_at=deadline_of(snapshot),
            shed=tuple(victim.request_id for victim in victims),
            promised_until=snapshot.promised_until,
        ),
        reasons=reasons,
        alternatives=["refuse"],
        rejected=[Rejection(victim.request_id, "shed: lowest band, least spent, newest") for victim in victims],
        policy_version=POLICY_VERSION,
    )


def _refuse(snapshot: AdmissionSnapshot, lane: Lane, now: float, refusal: Refusal) -> Decision[Admission]:
    promised = snapshot.promised_until
    if refusal.retry_after_s is not None and snapshot.prediction is not None:
        promised = min(
            now + MAX_RETRY_AFTER_S, max(promised, now + refusal.retry_after_s - 1) + snapshot.prediction.work_s
        )
    return Decision(
        choice=Admission(lane=lane, deadline_at=deadline_of(snapshot), refusal=refusal, promised_until=promised),
        reasons=[refusal.message],
        rejected=[Rejection("admit", refusal.code)],
        policy_version=POLICY_VERSION,
    )
