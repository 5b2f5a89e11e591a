"""Random arrivals, forks, aborts, failures and resets on tiny pools: the invariants hold at every step, and no request
notices anything.

Whatever is chunked, preempted, swapped, offloaded, loaded from elsewhere, found in the cache, forked or planned before
the last result is in: every request's tokens are those of a run in which it is alone; every request that is not ended
from outside ends by itself; afterwards every block is free.
"""

from __future__ import annotations

from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.memory.manager import KVManager
from dataplane.protocol import FinishReason, RequestOutput
from dataplane.request import Request, RequestState
from dataplane.scheduling.config import Batching, Capacity, Preemption, QueueOrder, SchedulerConfig
from dataplane.scheduling.connector import LocalConnector
from dataplane.scheduling.plan import Plan, StepResult
from dataplane.scheduling.scheduler import Scheduler
from tests.factories.requests import KVExecutor, extended, generated, make_request, undisturbed

TENANTS = ("acme", "beta")
EOS = 3
MAX_STEPS = 3000


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, one executor that keeps digests as KV, and the runs each request should have had."""

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        host_blocks=st.sampled_from([0, 0, 3, 12]),
        remote=st.booleans(),
        options=st.fixed_dictionaries(
            {
                "max_num_batched_tokens": st.integers(1, 24),
                "long_prefill_threshold": st.sampled_from([0, 1, 3]),
                "max_num_seqs": st.integers(1, 6),
                "watermark": st.sampled_from([0.0, 0.01, 0.3]),
                "batching": st.sampled_from(Batching),
                "batch_size": st.integers(0, 3),
                "batch_window_s": st.sampled_from([0.0, 5.0]),
                "bucket_ageing_s": st.sampled_from([0.0, 3.0]),
                "capacity": st.sampled_from(Capacity),
                "preemption": st.sampled_from(Preemption),
                "prefill_tokens_per_s": st.sampled_from([1e2, 1e9]),
                "order": st.sampled_from(QueueOrder),
                "steps_in_flight": st.sampled_from([1, 2]),
            }
        ),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool,
        host_blocks: int,
        remote: bool,
        options: dict[str, object],
    ) -> None:
        self.config = SchedulerConfig(**options)  # type: ignore[arg-type]  # drawn field by field
        self.kv = KVManager(num_blocks, block_size, prefix_caching=caching, events=True, host_blocks=host_blocks)
        self.roots: dict[str, int] = {}
        self.executor = KVExecutor(block_size, lambda request_id: self.roots[request_id])
        self.connector = LocalConnector(block_size, self.executor.memory.load) if remote else None
        self.executor.connector = self.connector
        self.scheduler = Scheduler(self.config, self.kv, eos_token_ids=[EOS], kv_bytes=4, connector=self.connector)
        self.capacity = (num_blocks - 1) * block_size
        self.block_size = block_size
        self.flights: deque[tuple[Plan, StepResult]] = deque()
        self.expected: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.unfinished: set[str] = set()
        self.ended_early: set[str] = set()
        self.first_seen: set[str] = set()
        self.indexed: set[bytes] = set()
        self.exported: set[bytes] = set()
        self.wasted = 0
        self.batch = 0
        self.to_fail = 0
        self.count = 0
        self.now = 0.0

    # ------------------------------------------------------------------------------------------------------- arrivals

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        request_id, self.count = str(self.count), self.count + 1
        # Few token values and common beginnings, so that prefixes meet.
        length = data.draw(st.integers(1, self.capacity))
        count = data.draw(st.integers(1, min(6, self.capacity - length + 1)))
        prompt = (
            [7] * length
            if data.draw(st.booleans())
            else data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        )
        forks = self._forks(request_id, length, count, data)
        tenant = data.draw(st.sampled_from(TENANTS))
        for number, name in enumerate((request_id, *forks)):
            self.roots[name] = TENANTS.index(tenant) + 1
            whole = undisturbed(prompt, self.roots[name], count, seed=number)
            self.expected[name] = whole[: whole.index(EOS) + 1] if EOS in whole else whole
            self.outputs[name] = []
            self.unfinished.add(name)
        patience = data.draw(st.sampled_from([None, None, None, 0.0, 4.0]))
        self.scheduler.add(
            make_request(
                request_id,
                prompt,
                max_tokens=count,
                tenant=tenant,
                forks=forks,
                priority=data.draw(st.sampled_from([0, 0, 0, 1])),
                queued=self.now,
                deadline=None if patience is None else self.now + patience,
                read_cache=data.draw(st.sampled_from([True, True, True, False])),
            )
        )

    def _forks(self, request_id: str, length: int, count: int, data: st.DataObject) -> tuple[str, ...]:
        """As many forks as could run: each needs a seat, and where blocks are reserved its own tail."""
        most = self.config.max_num_seqs - 1
        if self.config.capacity is Capacity.RESERVE_MAX:
            blocks, shared = -(-(length + count - 1) // self.block_size), length // self.block_size
            tail = blocks - shared
            most = min(most, (self.kv.pool.usable - blocks) // tail) if tail else most
        number = data.draw(st.sampled_from([0, 0, 1, 3]))
        return tuple(f"{request_id}.{index}" for index in range(min(number, most)))

    # ------------------------------------------------------------------------------------------------- what may happen

    @precondition(lambda self: self.scheduler.has_work())
    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._one_step()

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(sorted(self.unfinished)))
        outputs = self.scheduler.abort([victim, "unknown"], self.now)
        assert outputs[0].request_id == victim
        for output in outputs:
            assert output.finish is FinishReason.ABORT
            self._ended(output.request_id)
        assert self.flights or self.scheduler.waiting_for_remote_kv or self.kv.table(victim) == []

    @rule()
    def fail(self) -> None:
        """The next sample is not a number."""
        self.to_fail = 1

    @rule()
    def reset(self) -> None:
        held = any(self.kv.held(name) or self.kv.is_swapped(name) for name in self.roots)
        assert self.kv.reset_prefix_cache() == (not held)

    @precondition(lambda self: self.connector is not None)
    @rule()
    def export(self) -> None:
        """Keep elsewhere what was computed so far."""
        assert self.connector is not None
        for request in self.scheduler.running:
            if request.in_flight == 0:
                for block, key in zip(self.kv.table(request.request_id), request.block_hashes, strict=False):
                    index = request.block_hashes.index(key)
                    if (index + 1) * self.block_size <= request.computed:
                        self.connector.store(key, self.executor.memory.copy(block))
                        self.exported.add(key)

    @precondition(lambda self: self.connector is not None)
    @rule(lose=st.booleans())
    def deliver(self, lose: bool) -> None:
        assert self.connector is not None
        if lose:
            for key in self.exported:
                self.connector.forget(key)
            self.exported.clear()
        self.connector.deliver()

    # ---------------------------------------------------------------------------------------------------------- a step

    def _one_step(self) -> None:
        """As the engine does it: plan until as many steps as may be are in flight, then take the first result."""
        if not self.scheduler.has_work():
            return
        self.now += 1.0
        outputs: list[RequestOutput] = []
        while len(self.flights) < self.config.steps_in_flight:
            before = {request.request_id for request in self.scheduler.running}
            plan = self.scheduler.plan(self.now)
            self._check(plan, before)
            self.executor_runs(plan)
            if not plan.tokens:
                if not self.flights:
                    outputs += self.scheduler.commit(plan, StepResult({}), self.now)
                    assert outputs or self._waits_with_reason() or not self.scheduler.has_work()
                break
        if self.flights:
            outputs += self._commit()
        for output in outputs:
            self._take(output)
        self.scheduler.check_integrity()

    def executor_runs(self, plan: Plan) -> None:
        result = self.executor.run(plan)
        if plan.tokens:
            if self.to_fail and result.tokens:
                self.to_fail = 0
                result.errors[min(result.tokens)] = "not a number"
            self.flights.append((plan, result))

    def _commit(self) -> list[RequestOutput]:
        plan, result = self.flights.popleft()
        for name, count in plan.tokens.items():
            if name in self.ended_early or name not in self.unfinished:
                self.wasted += count
        outputs = self.scheduler.commit(plan, result, self.now)
        assert self.scheduler.accounts.scheduling.wasted_tokens == self.wasted
        return outputs

    def _waits_with_reason(self) -> bool:
        """Nobody runs, though there is work."""
        if self.scheduler.waiting_for_remote_kv:
            assert self.connector is not None
            self.connector.deliver()
            return True
        wakes = self.scheduler.wakes_at()
        return wakes is not None and self.now < wakes

    def _check(self, plan: Plan, before: set[str]) -> None:
        assert plan.total_tokens <= self.config.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        assert all(count > 0 for count in plan.tokens.values())
        assert set(plan.tokens) | {new.request_id for new in plan.new} <= {r.request_id for r in self.scheduler.running}
        if self.config.capacity is Capacity.RESERVE_MAX:
            assert not self.scheduler.accounts.scheduling.preemptions
        # A table only grows, except where the plan says so: what the executor holds is what the manager holds.
        for running in plan.running:
            table = extended(self.executor.tables[running.request_id], running)
            assert table == self.kv.table(running.request_id)
        if self.config.batching in (Batching.STATIC, Batching.DYNAMIC):
            fresh = [new for new in plan.new if not new.parent and new.request_id not in self.first_seen]
            self.batch = (self.batch if before else 0) + len(fresh)
            assert self.batch <= (self.config.batch_size or self.config.max_num_seqs)
        if self.config.batching is Batching.CONTINUOUS and self.config.order is QueueOrder.FCFS and not self.connector:
            self._check_first_come(plan)
        self.first_seen |= {new.request_id for new in plan.new}

    def _check_first_come(self, plan: Plan) -> None:
        """Nobody who came later starts before somebody of the same priority who waits."""
        for new in plan.new:
            if new.request_id not in self.first_seen and not new.parent:
                started = self._request(new.request_id)
                for other in self.scheduler.waiting:
                    assert (other.priority, _arrival(other)) > (started.priority, _arrival(started))

    def _request(self, request_id: str) -> Request:
        return self.scheduler._requests[request_id]

    def _take(self, output: RequestOutput) -> None:
        name = output.request_id
        self.outputs[name] += generated([output])
        if output.finish is FinishReason.ERROR:
            assert output.error is not None
            if output.error.startswith("deadline_exceeded"):
                assert not self.outputs[name]
            self._ended(name)
        elif output.finish is not None:
            assert output.finish in (FinishReason.LENGTH, FinishReason.STOP)
            assert self.outputs[name] == self.expected[name]
            self.unfinished.remove(name)

    def _ended(self, name: str) -> None:
        """Ended from outside: what came until then is right, and nothing comes any more."""
        assert self.outputs[name] == self.expected[name][: len(self.outputs[name])]
        self.unfinished.remove(name)
        self.ended_early.add(name)

    # ------------------------------------------------------------------------------------------------------ invariants

    @invariant()
    def integrity(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        self._replay_events()
        assert self.scheduler.empty_slots >= 0
        if self.config.capacity is Capacity.ON_DEMAND and not self.connector:
            running = [request for request in self.scheduler.running if request.state is RequestState.RUNNING]
            holders = len(running) + len(self.scheduler._flights.leaving)
            assert self.scheduler.empty_slots <= holders * max(1, self.block_size - 1)

    def _replay_events(self) -> None:
        """An indexer that follows the events knows exactly the hashes that are findable."""
        for event in self.kv.take_events():
            kind = type(event).__name__
            if kind == "BlockStored":
                assert not self.indexed.intersection(event.block_hashes)  # type: ignore[union-attr]  # told apart by name
                self.indexed.update(event.block_hashes)  # type: ignore[union-attr,arg-type]  # told apart by name
            elif kind == "BlockRemoved":
                self.indexed.difference_update(event.block_hashes)  # type: ignore[union-attr,arg-type]  # told apart by name
            else:
                self.indexed.clear()
        assert self.indexed == set(self.kv.pool.index._blocks)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work():
                break
            self._one_step()
        assert not self.scheduler.has_work(), "a request starves"
        assert not self.unfinished
        assert self.kv.free_blocks == self.kv.pool.usable
        assert self.kv.host.used == 0


def _arrival(request: Request) -> int:
    """Requests are numbered, and so are their forks after a point."""
    return int(request.request_id.partition(".")[0])


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
