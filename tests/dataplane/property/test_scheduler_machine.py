"""Random arrivals, aborts and resets on tiny pools: the invariants hold at every step, and no request notices.

Whatever is chunked, preempted, found in the cache or evicted, every request's tokens are those of a run in which
it is alone; every request that is not aborted ends; afterwards every block is free.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.memory.manager import KVManager
from dataplane.protocol import FinishReason
from dataplane.scheduling.config import SchedulerConfig
from dataplane.scheduling.scheduler import Scheduler
from tests.factories.requests import KVExecutor, generated, make_request, undisturbed

TENANTS = ("acme", "beta")
MAX_STEPS = 3000


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, one executor that keeps digests as KV, and the runs each request should have had."""

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 24),
        threshold=st.sampled_from([0, 1, 3]),
        max_num_seqs=st.integers(1, 6),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        caching=st.booleans(),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        threshold: int,
        max_num_seqs: int,
        watermark: float,
        caching: bool,
    ) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            long_prefill_threshold=threshold,
            max_num_seqs=max_num_seqs,
            watermark=watermark,
        )
        self.scheduler = Scheduler(config, KVManager(num_blocks, block_size, prefix_caching=caching, events=True))
        self.config = config
        self.capacity = (num_blocks - 1) * block_size
        self.block_size = block_size
        self.roots: dict[str, int] = {}
        self.executor = KVExecutor(block_size, lambda request_id: self.roots[request_id])
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.indexed: dict[bytes, int] = {}
        self.now = 0.0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        request_id = str(len(self.prompts))
        # Few token values and common beginnings, so that prefixes meet.
        length = data.draw(st.integers(1, self.capacity))
        count = data.draw(st.integers(1, min(6, self.capacity - length + 1)))
        shared = data.draw(st.booleans())
        prompt = [7] * length if shared else data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        tenant = data.draw(st.sampled_from(TENANTS))
        self.roots[request_id] = TENANTS.index(tenant) + 1
        self.prompts[request_id] = (prompt, count)
        self.outputs[request_id] = []
        priority = data.draw(st.sampled_from([0, 0, 0, 1]))
        self.scheduler.add(
            make_request(request_id, prompt, max_tokens=count, tenant=tenant, priority=priority, queued=self.now)
        )

    @precondition(lambda self: self.scheduler.has_work())
    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._one_step()

    @precondition(lambda self: self.scheduler.has_work())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted(self.scheduler._requests)
        victim = data.draw(st.sampled_from(live))
        (output,) = self.scheduler.abort([victim], self.now)
        assert output.finish is FinishReason.ABORT
        assert self.scheduler.kv.table(victim) == []
        self.prompts[victim] = ([], -1)

    @rule()
    def reset(self) -> None:
        assert self.scheduler.kv.reset_prefix_cache() == (not self.scheduler.running)

    def _one_step(self) -> None:
        if not self.scheduler.has_work():
            return
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        assert plan.tokens, "there is work and nobody runs"
        assert plan.total_tokens <= self.config.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        assert all(count > 0 for count in plan.tokens.values())
        outputs = self.scheduler.commit(plan, self.executor.run(plan), self.now)
        for output in outputs:
            self.outputs[output.request_id] += generated([output])
            if output.finish is not None:
                prompt, count = self.prompts[output.request_id]
                assert output.finish is FinishReason.LENGTH
                assert self.outputs[output.request_id] == undisturbed(prompt, self.roots[output.request_id], count)
        self.scheduler.check_integrity()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            self._replay_events()
            assert 0 <= self.scheduler.empty_slots <= len(self.scheduler.running) * max(1, self.block_size - 1)

    def _replay_events(self) -> None:
        """An indexer that follows the events knows exactly the hashes that are findable."""
        for event in self.scheduler.kv.take_events():
            kind = type(event).__name__
            if kind == "BlockStored":
                for key in event.block_hashes:  # type: ignore[union-attr]  # told apart by name
                    assert key not in self.indexed
                    self.indexed[key] = 1
            elif kind == "BlockRemoved":
                for key in event.block_hashes:  # type: ignore[union-attr]  # told apart by name
                    del self.indexed[key]
            else:
                self.indexed.clear()
        assert set(self.indexed) == set(self.scheduler.kv.pool.index._blocks)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work():
                break
            self._one_step()
        assert not self.scheduler.has_work(), "a request starves"
        assert self.scheduler.kv.free_blocks == self.scheduler.kv.pool.usable
        for request_id, (prompt, count) in self.prompts.items():
            if count >= 0:
                assert self.outputs[request_id] == undisturbed(prompt, self.roots[request_id], count)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
