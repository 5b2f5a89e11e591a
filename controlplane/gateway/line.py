"""One model's line at this gateway: who waits, whom the pool's shared queue lets go, and how long that will take.

Layer: service. Admission decides before a request joins the line; the shared queue decides when it goes. Where nobody
waits and there is room neither costs a call. It must never choose a replica.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

import msgspec
from redis.asyncio import Redis

from controlplane.admission import policy
from controlplane.admission.bands import Band, lane_of
from controlplane.admission.calibration import Calibrator
from controlplane.admission.dispatch import Waiting, rules_of
from controlplane.admission.fair_queue import FairQueue, QueueFullError
from controlplane.admission.pace import Pace
from controlplane.admission.places import Places
from controlplane.admission.policy import PATIENCE_S, AdmissionSnapshot, Newcomer, Queued, QueueLimits, Refusal
from controlplane.admission.prediction import Ahead, PoolLoad, Prediction, StepCost, predict
from controlplane.admission.retry import Asker
from controlplane.admission.turn_messages import Grant, Rules
from controlplane.background import kept
from controlplane.errors import CapacityError
from controlplane.gateway.credits import Credits
from controlplane.gateway.dispatch_metrics import DispatchMetrics, QueueState
from controlplane.gateway.line_refusals import queue_full, refused, waited_out
from controlplane.gateway.line_refusals import shed as shed_error
from controlplane.gateway.turns import Newly, Turn
from controlplane.redis_pipe import ScriptPipe

RULES_S = 0.2
"""How long the sum of the replicas' credits is used before it is taken again."""
TRUST_S = 30.0
"""A speed that no first token has borne out for so long refuses nobody: if it refused all, it never would be."""
STEP_BUDGET = 2048
"""Tokens of an engine's step, where nobody has told."""


class Line:
    """One model's, which all gateways share by its name; `pool` is the one whose plans and objectives hold. `limits`
    bound it, `wait_s` is the longest that a request stands in it. `open` starts its work.
    """

    def __init__(
        self,
        redis: Redis,
        pipe: ScriptPipe,
        model: str,
        pool: str,
        gateway: str,
        *,
        credits: Credits,
        metrics: DispatchMetrics,
        limits: QueueLimits,
        wait_s: float,
        rng: random.Random,
    ) -> None:
        self.model = model
        self.pool = pool
        self.pace = Pace(model)
        self.queue = FairQueue(redis, model, gateway, self.rules, pipe=pipe)
        self.cost: StepCost | None = None
        """The pool's published step model."""
        self._weights: dict[str, float] = {}
        self.queue.adopt_weights(self._weights)
        self._credits = credits
        self._metrics = metrics
        self._limits = limits
        self._wait_s = wait_s
        self._rng = rng
        self._calibrator = Calibrator(model)
        self._seen_at = time.monotonic()
        self._promised_until = 0.0
        self._queued: dict[str, Queued] = {}
        self._places = Places(limits, rng)
        self._uncached: dict[str, int] = {}
        self._askers: dict[str, Asker] = {}
        self._serial = 0
        self._name = gateway
        self._rules = Rules(0, 0, 1, 0, 0)
        self._replicas = 0
        self._rules_until = 0.0
        self._work: list[asyncio.Task[None]] = []
        self._closed: Callable[[], CapacityError] | None = None

    def open(self) -> None:
        """Start taking turns, in this loop."""
        self._work = [
            asyncio.create_task(kept(name, run), name=f"gateway {name}")
            for name, run in (
                (f"turns of {self.model}", self.queue.run),
                (f"pokes of {self.model}", self.queue.listen),
            )
        ]

    async def close(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def rules(self) -> Rules:
        """What the model's replicas hold together."""
        now = time.monotonic()
        if now >= self._rules_until:
            credits = self._credits.of(self.model)
            self._rules, self._replicas = rules_of(credits), len(credits)
            self._rules_until = now + RULES_S
        return self._rules

    def changed(self) -> None:
        """The fleet has changed: what it holds is to be summed anew."""
        self._rules_until = 0.0
        if self._queued:
            self.queue.wake()

    @property
    def idle(self) -> bool:
        return not self._queued and not len(self.queue)

    @property
    def long_runs(self) -> bool:
        """Whether any gateway's long prompt runs, as last heard."""
        return self.queue.last is not None and self.queue.last.long > 0

    def state(self, epoch: int) -> QueueState:
        last = self.queue.last
        return QueueState(
            model=self.model,
            waiting=Counter(each.band for each in self._queued.values()),
            slots=self.rules().slots,
            taken=last.slots if last is not None else 0,
            away=self.queue.away,
            epoch=epoch,
        )

    def turn_away(self, tenant: str, asker: Asker, weight: float, band: Band, most_input: int) -> None:
        """Refuse at once what a full line would not let in; costs no call. Raises CapacityError (503)."""
        if not self._queued:
            return
        lane = lane_of(self.pace.prompt(tenant, most_input)[0], self._limits.long_prompt)
        self._weights[tenant] = weight
        code = self._places.full_for(tenant, lane, band, self._weights)
        if code is not None:
            retry_after_s = self._places.refuse(code, tenant, asker, lane, time.monotonic())
            self._metrics.was_refused(band, code)
            raise refused(policy.full(self._limits, lane, retry_after_s, of_tenant=code == "tenant_queue_full"), None)

    async def turn(self, newly: Newly) -> Turn:
        """Wait for the request's turn. Raises CapacityError (503) when it is refused at once or in the end."""
        if not self.rules().slots:
            raise self._credits.none_left(self.model)
        now = time.time()
        uncached, cached = self.pace.prompt(newly.tenant, newly.most_input)
        request = self._request(newly, uncached, cached, now)
        self._weights[newly.tenant] = newly.weight
        if newly.deadline_s is None and (grant := self.queue.at_once(request)) is not None:
            self._metrics.went_at_once(newly.band)
            return Turn(self, request, grant.tag, newly.most_input, None)
        prediction = self._predict(request)
        self._admit(newly, request, prediction, now)
        late = self.queue.at_once(request)
        if late is not None:
            self._metrics.went_at_once(newly.band)
            return Turn(self, request, late.tag, newly.most_input, prediction)
        if self._closed is not None:
            raise self._closed()
        grant = await self._stand(request, newly.asker, now)
        self._metrics.went(newly.band, max(0.0, time.time() - now))
        return Turn(self, request, grant.tag, newly.most_input, prediction)

    def refuse_waiting(self, error: Callable[[], CapacityError]) -> None:
        """Everybody who waits gives up, and nobody begins to wait any more."""
        self._closed = error
        for request_id in list(self._queued):
            self.queue.leave(request_id, error())

    def first_token(self, uncached: int, seconds: float) -> None:
        """A stream had its first token so long after it was dispatched."""
        self.pace.first_token(uncached, seconds)
        self._seen_at = time.monotonic()

    def observed(self, tenant: str, prediction: Prediction, ttft_s: float, uncached: int, cached: int) -> None:
        """A stream whose TTFT was predicted has had its first token; the engine has counted its prompt."""
        if prediction.ttft.value > 0:
            self._metrics.ratio.observe(ttft_s / prediction.ttft.value)
        modelled_s = prediction.modelled_of(uncached, cached)
        self._calibrator.observed(tenant, modelled_s, ttft_s, uncached=uncached, cached=cached, now=time.monotonic())

    def _request(self, newly: Newly, uncached: int, cached: int, now: float) -> Waiting:
        self._serial += 1
        own = PATIENCE_S if newly.deadline_s is None else newly.deadline_s
        promised = PATIENCE_S if newly.objective_s is None else newly.objective_s
        return Waiting(
            request_id=f"{self._name}-{self._serial}",
            tenant=newly.tenant,
            lane=lane_of(uncached, self._limits.long_prompt),
            band=newly.band,
            deadline_at=now + min(own, promised),
            uncached=uncached,
            cached=cached,
            output=self.pace.output(newly.most_output),
        )

    def _admit(self, newly: Newly, request: Waiting, prediction: Prediction | None, now: float) -> None:
        """Join the line, after those were shed who must make room. Raises CapacityError."""
        snapshot = AdmissionSnapshot(
            pool=self.pool,
            request=Newcomer(
                request_id=request.request_id,
                tenant=request.tenant,
                band=request.band,
                uncached=request.uncached,
                cached=request.cached,
                arrived_at=now,
                deadline_at=None if newly.deadline_s is None else now + newly.deadline_s,
            ),
            queued=tuple(self._queued.values()),
            limits=self._places.limits_for(request.tenant, newly.asker, request.lane, time.monotonic()),
            weights=self._weights,
            objective_s=newly.objective_s,
            prediction=prediction,
            promised_until=self._promised_until,
        )
        admission = policy.decide(snapshot, now, self._rng).choice
        assert admission is not None, "admission always chooses"
        self._promised_until = admission.promised_until
        if admission.refusal is not None:
            self._metrics.was_refused(request.band, admission.refusal.code)
            raise refused(self._timed(admission.refusal, request, newly.asker), prediction)
        for victim in admission.shed:
            asker, shed = self._askers[victim], self._leave_line(victim)
            assert shed is not None, "only who waits is shed"
            wait_s = self._places.refuse("shed", shed.tenant, asker, shed.lane, time.monotonic())
            if self.queue.leave(victim, shed_error(wait_s)):
                self._metrics.was_refused(shed.band, "shed")

    def _timed(self, refusal: Refusal, request: Waiting, asker: Asker) -> Refusal:
        """With the wait after which a place in line is kept, where that was what was missing."""
        if refusal.code not in {"queue_full", "tenant_queue_full"}:
            return refusal
        wait_s = self._places.refuse(refusal.code, request.tenant, asker, request.lane, time.monotonic())
        return msgspec.structs.replace(refusal, retry_after_s=wait_s)

    def _leave_line(self, name: str) -> Queued | None:
        queued = self._queued.pop(name, None)
        if queued is not None:
            self._places.left(queued, time.monotonic())
        return queued

    def _wait_out(self, request: Waiting) -> None:
        asker = self._askers[request.request_id]
        wait_s = self._places.refuse("queue_wait_exceeded", request.tenant, asker, request.lane, time.monotonic())
        self.queue.leave(request.request_id, waited_out(self._wait_s, wait_s))

    async def _stand(self, request: Waiting, asker: Asker, now: float) -> Grant:
        name = request.request_id
        queued = self._queued[name] = Queued(
            request_id=name, tenant=request.tenant, lane=request.lane, band=request.band, arrived_at=now
        )
        self._places.stood(queued)
        self._uncached[name] = request.uncached
        self._askers[name] = asker
        timer = asyncio.get_running_loop().call_later(self._wait_s, self._wait_out, request)
        try:
            return await self.queue.turn_of(request)
        except QueueFullError:
            self._metrics.was_refused(request.band, "queue_full")
            wait_s = self._places.refuse("queue_full", request.tenant, asker, request.lane, time.monotonic())
            raise queue_full(wait_s) from None
        except CapacityError as error:
            if error.code == "queue_wait_exceeded":
                self._metrics.was_refused(request.band, error.code)
            raise
        finally:
            timer.cancel()
            self._leave_line(name)
            del self._uncached[name], self._askers[name]

    def _predict(self, request: Waiting) -> Prediction | None:
        now, last = time.monotonic(), self.queue.last
        cost = self.cost or (self.pace.cost() if now - self._seen_at <= TRUST_S else None)
        if cost is None or last is None or not self._replicas:
            return None
        rules = self.rules()
        load = PoolLoad(
            replicas=self._replicas,
            slots=rules.slots,
            running=last.slots,
            tokens=rules.tokens,
            held=last.tokens,
            budget=STEP_BUDGET,
            hold_s=self.pace.hold_s,
        )
        return predict(
            cost,
            load,
            self._ahead(request, last.waiting),
            self._calibrator.of(request.tenant, now),
            uncached=request.uncached,
            cached=request.cached,
            output=request.output,
        )

    def _ahead(self, request: Waiting, waiting: int) -> Ahead:
        """Who goes before `request`, in all gateways: of its tenant those that stand here, and of the others as many
        for each of these as their weights say, but no more than wait in its band or one before it.
        """
        before = [each for each in self._queued.values() if each.band <= request.band and each.lane is request.lane]
        if not before:
            return Ahead()
        counts = Counter(each.tenant for each in before)
        everyone = len(before) * max(1.0, waiting / max(1, len(self._queued)))
        weights = {tenant: self._weights.get(tenant, 1.0) for tenant in (*counts, request.tenant)}
        turns = (counts[request.tenant] + 1) * sum(weights.values()) / weights[request.tenant] - 1
        requests = round(min(everyone, turns))
        uncached = sum(self._uncached[each.request_id] for each in before) / len(before)
        return Ahead(requests=requests, uncached=round(uncached * requests), tokens=round(request.tokens * requests))
