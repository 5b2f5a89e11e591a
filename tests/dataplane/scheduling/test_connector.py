"""KV that is loaded from elsewhere while others run. Case S5 is in test_reference_cases.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dataplane.protocol import FinishReason
from dataplane.request import RequestError, RequestState
from dataplane.scheduling.config import Capacity
from dataplane.scheduling.connector import LocalConnector
from dataplane.scheduling.plan import Plan, StepResult
from dataplane.scheduling.scheduler import Scheduler
from tests.factories.requests import KVExecutor, fold_all, generated, make_request, make_scheduler, undisturbed

SIZE = 4
PROMPT = list(range(10))


class Bench:
    """A scheduler with a connector that holds the full blocks of some prompts, and an executor with real KV."""

    def __init__(self, *prompts: Sequence[int], **options: object) -> None:
        self.executor = KVExecutor(SIZE, lambda _: 1)
        self.connector = self.executor.connector = LocalConnector(SIZE, self.executor.memory.load)
        self.scheduler: Scheduler = make_scheduler(
            **{"block_size": SIZE, "watermark": 0.0, **options, "connector": self.connector}  # type: ignore[arg-type]
        )
        self.keys: list[bytes] = []
        for prompt in prompts:
            request = make_request("keys", prompt)
            self.scheduler.kv.match(request)
            for index, key in enumerate(request.block_hashes):
                ends = range(index * SIZE + 1, index * SIZE + SIZE + 1)
                self.connector.store(key, dict(enumerate(fold_all(1, prompt[:end]) for end in ends)))
            self.keys += request.block_hashes

    def add(self, name: str, prompt: Sequence[int] = PROMPT, **fields: object) -> None:
        self.scheduler.add(make_request(name, prompt, **fields))  # type: ignore[arg-type]  # a table of fields

    def step(self) -> Plan:
        plan = self.scheduler.plan(0.0)
        self.outputs = self.scheduler.commit(plan, self.executor.run(plan), 0.0)
        self.scheduler.check_integrity()
        return plan

    def finish(self, name: str) -> list[int]:
        tokens = generated(output for output in self.outputs if output.request_id == name)
        while self.scheduler.has_work():
            assert self.step().tokens, "nobody runs"
            tokens += generated(output for output in self.outputs if output.request_id == name)
        return tokens


def test_others_run_while_kv_is_loaded() -> None:
    bench = Bench(PROMPT)
    bench.add("far", max_tokens=3)
    bench.add("near", [50, 51], max_tokens=4)
    assert bench.step().tokens == {"near": 2}
    assert bench.scheduler.waiting_for_remote_kv == 1
    assert bench.scheduler.kv.held("far") == 2
    assert bench.step().tokens == {"near": 1}
    bench.connector.deliver()
    plan = bench.step()
    assert plan.tokens == {"near": 1, "far": 2}
    assert (plan.new[0].computed, len(plan.new[0].blocks)) == (8, 3)
    assert bench.finish("far") == undisturbed(PROMPT, 1, 3)


def test_what_the_cache_has_is_not_loaded() -> None:
    bench = Bench(PROMPT)
    for key in bench.keys[:1]:
        bench.connector.forget(key)
    bench.add("first", PROMPT[:5], max_tokens=1)
    assert bench.step().tokens == {"first": 5}
    bench.add("second", max_tokens=3)
    assert bench.step().tokens == {}
    bench.connector.deliver()
    assert bench.step().tokens == {"second": 2}
    assert bench.outputs[0].cached_tokens == 8
    assert bench.finish("second") == undisturbed(PROMPT, 1, 3)


def test_a_load_is_cut_short_of_the_last_token() -> None:
    bench = Bench(PROMPT)
    bench.add("a", PROMPT[:8], max_tokens=2)
    assert bench.step().tokens == {}
    bench.connector.deliver()
    assert bench.step().tokens == {"a": 4}
    assert bench.finish("a") == undisturbed(PROMPT[:8], 1, 2)


def test_what_a_load_did_not_bring_is_computed() -> None:
    bench = Bench(PROMPT)
    bench.add("a", max_tokens=3)
    bench.step()
    bench.connector.forget(bench.keys[1])
    bench.connector.deliver()
    assert bench.step().tokens == {"a": 6}
    assert bench.finish("a") == undisturbed(PROMPT, 1, 3)


def test_blocks_on_their_way_cannot_be_found() -> None:
    bench = Bench(PROMPT)
    bench.add("a", max_tokens=2)
    bench.step()
    assert bench.scheduler.kv.match(make_request("b", PROMPT)).tokens == 0
    bench.connector.deliver()
    bench.step()
    assert bench.scheduler.kv.match(make_request("b", PROMPT)).tokens == 8


def test_an_abort_gives_the_blocks_back_when_the_load_has_ended() -> None:
    bench = Bench(PROMPT)
    bench.add("a")
    bench.step()
    (output,) = bench.scheduler.abort(["a"], 0.0)
    assert output.finish is FinishReason.ABORT
    assert bench.scheduler.kv.held("a") == 2
    bench.scheduler.check_integrity()
    # The id is still in use by the blocks that are being written. Nobody else waits for them.
    with pytest.raises(RequestError, match="the request id a is in use"):
        bench.add("a", [50, 51], max_tokens=2)
    bench.add("b", [60, 61], max_tokens=1)
    assert bench.step().tokens == {"b": 2}
    bench.connector.deliver()
    assert bench.step().tokens == {}
    bench.add("a", [50, 51], max_tokens=2)
    assert bench.step().tokens == {"a": 2}
    assert bench.finish("a") == undisturbed([50, 51], 1, 2)
    assert bench.scheduler.kv.pool.used == 0


def test_those_who_were_loaded_and_wait_give_way_to_those_who_run() -> None:
    """Five blocks: "near" has a seat and two, "far" was loaded into two and waits for the seat."""
    bench = Bench(PROMPT, num_blocks=6, max_num_seqs=2, max_num_batched_tokens=8)
    bench.add("near", range(50, 58), max_tokens=9)
    assert bench.step().tokens == {"near": 8}
    far = make_request("far", PROMPT, max_tokens=2)
    bench.scheduler.add(far)
    assert bench.step().tokens == {"near": 1}
    assert far.state is RequestState.WAITING_FOR_REMOTE_KV
    bench.add("other", [70], max_tokens=9, priority=-1)
    bench.connector.deliver()
    # "other" has the second seat, but no block is left for it.
    assert bench.step().tokens == {"near": 1}
    assert (far.state, far.computed) == (RequestState.WAITING, 8)
    assert [bench.step().tokens for _ in range(2)] == [{"near": 1}] * 2
    # Its thirteenth token needs a fourth block: what was loaded is given up, and "other" gets one of the two.
    assert bench.step().tokens == {"near": 1, "other": 1}
    assert (far.computed, bench.scheduler.kv.held("far")) == (0, 0)


def test_two_loaded_requests_that_fill_the_pool_do_not_wait_for_each_other() -> None:
    prompts = [list(range(start, start + 10)) for start in (0, 20)]
    bench = Bench(*prompts, num_blocks=5)
    for name, prompt in zip("ab", prompts, strict=True):
        bench.add(name, prompt, max_tokens=3)
    assert bench.step().tokens == {}
    assert bench.scheduler.kv.free_blocks == 0
    bench.connector.deliver()
    assert bench.step().tokens == {"a": 2}
    tokens = generated(bench.outputs)
    assert bench.scheduler.kv.held("b") == 0
    while bench.scheduler.running:
        bench.step()
        tokens += generated(output for output in bench.outputs if output.request_id == "a")
    assert tokens == undisturbed(prompts[0], 1, 3)
    assert bench.step().tokens == {}
    bench.connector.deliver()
    assert bench.finish("b") == undisturbed(prompts[1], 1, 3)
    # Though "b" was loaded twice.
    assert bench.scheduler.kv.recent_hits.requests == 2


def test_a_request_that_may_not_read_the_cache_loads_nothing() -> None:
    bench = Bench(PROMPT)
    bench.add("a", read_cache=False, max_tokens=1)
    assert bench.step().tokens == {"a": 10}


def test_a_deadline_passes_during_a_load() -> None:
    bench = Bench(PROMPT)
    bench.add("a", deadline=5.0)
    bench.step()
    plan = bench.scheduler.plan(6.0)
    (output,) = bench.scheduler.commit(plan, StepResult({}), 6.0)
    assert output.finish is FinishReason.ERROR
    bench.connector.deliver()
    bench.step()
    assert bench.scheduler.kv.pool.used == 0
    assert not bench.scheduler.has_work()


def test_hits_are_told_apart_by_where_they_were() -> None:
    """Of 17 tokens 4 are on the device, 4 in host memory and 8 elsewhere; what was loaded is no hit of the cache."""
    prompt = list(range(17))
    bench = Bench(prompt, num_blocks=8, host_blocks=8)
    for key in bench.keys[:2]:
        bench.connector.forget(key)
    bench.add("first", prompt[:8], max_tokens=1)
    bench.step()
    # Six of seven blocks: the tail of the first prompt goes to host memory.
    bench.add("filler", range(100, 124), max_tokens=1)
    bench.step()
    match = bench.scheduler.kv.match(make_request("x", prompt))
    assert (match.tokens, match.host_tokens) == (8, 4)
    bench.add("second", prompt, max_tokens=1)
    assert bench.step().tokens == {}
    bench.connector.deliver()
    assert bench.step().tokens == {"second": 1}
    (output,) = bench.outputs
    assert (output.cached_tokens, output.host_tokens) == (16, 4)
    memory = bench.scheduler.accounts.memory
    assert (memory.prefix_queries, memory.prefix_hits) == (8 + 24 + 17, 8)
    assert (memory.host_hits, memory.remote_hits) == (4, 8)
    assert bench.scheduler.kv.recent_hits.rate == 8 / (8 + 24 + 17)


def test_a_load_after_a_preemption_is_no_hit_either() -> None:
    """Six blocks: "old" grows into all of them, and what "new" had loaded is evicted and loaded again."""
    bench = Bench(PROMPT, num_blocks=7)
    bench.add("old", range(50, 58), max_tokens=17)
    bench.step()
    bench.add("new", max_tokens=6)
    bench.step()
    bench.connector.deliver()
    for _ in range(40):
        bench.step()
        bench.connector.deliver()
    assert not bench.scheduler.has_work()
    assert bench.scheduler.accounts.scheduling.preemptions == {"recompute": 1}
    memory = bench.scheduler.accounts.memory
    assert (memory.prefix_hits, memory.remote_hits) == (0, 8)
    assert memory.recompute_queries > 10
    assert memory.recompute_hits == 0


def test_a_deadline_takes_nothing_from_those_who_share_the_cache() -> None:
    bench = Bench(list(range(20)), max_num_seqs=1, max_num_batched_tokens=64)
    bench.add("first", range(10), max_tokens=2)
    store, bench.connector._store = bench.connector._store, {}
    bench.step()
    bench.finish("first")
    bench.connector._store = store
    bench.add("late", range(20), max_tokens=5, deadline=5.0)
    bench.step()
    bench.connector.deliver()
    bench.add("busy", [40, 41, 42], max_tokens=50, priority=-1)
    bench.step()
    plan = bench.scheduler.plan(6.0)
    assert [output.error for output in bench.scheduler.commit(plan, bench.executor.run(plan), 6.0) if output.error]
    assert plan.scrub == ()
    assert bench.scheduler.kv.match(make_request("next", range(10))).tokens == 8


def test_a_part_of_a_block_that_was_loaded_does_not_count() -> None:
    prompt = list(range(20))
    bench = Bench(prompt)
    bench.add("a", prompt, max_tokens=3)
    bench.step()
    bench.connector.deliver()
    bench.connector._loaded[0] = ("a", 7)
    plan = bench.step()
    assert (plan.tokens, plan.new[0].computed) == ({"a": 16}, 4)
    assert bench.finish("a") == undisturbed(prompt, 1, 3)


@pytest.mark.parametrize("loaded", [False, True])
def test_blocks_are_charged_until_a_request_that_waits_with_them_ends(loaded: bool) -> None:
    bench = Bench(PROMPT, max_num_seqs=1)
    bench.add("a")
    plan = bench.scheduler.plan(0.0)
    bench.scheduler.commit(plan, bench.executor.run(plan), 0.0)
    if loaded:
        bench.connector.deliver()
        bench.add("busy", [40, 41], max_tokens=50, priority=-1)
        plan = bench.scheduler.plan(1.0)
        bench.scheduler.commit(plan, bench.executor.run(plan), 1.0)
    held = bench.scheduler.kv.held("a")
    assert held > 0
    (output,) = bench.scheduler.abort(["a"], 100.0)
    assert output.kv_block_seconds == 100.0 * held


def test_the_forks_of_a_request_that_is_being_loaded_keep_the_room_that_is_reserved_for_them() -> None:
    bench = Bench(range(16), num_blocks=15, capacity=Capacity.RESERVE_MAX)
    bench.add("far", range(28), max_tokens=2, forks=("far.1", "far.2"))
    bench.add("near", range(100, 116), max_tokens=7)
    bench.step()
    assert bench.scheduler.kv.held("near") == 0, "six blocks are free, two of them for the forks"
    for _ in range(3):
        bench.step()
    bench.connector.deliver()
    bench.finish("far")
    assert not bench.scheduler.accounts.scheduling.preemptions
    assert bench.scheduler.kv.pool.used == 0


def test_room_is_free_again_when_a_request_with_forks_is_aborted_while_it_is_loaded() -> None:
    bench = Bench(range(16), num_blocks=15, capacity=Capacity.RESERVE_MAX)
    bench.add("far", range(28), max_tokens=2, forks=("far.1", "far.2"))
    bench.step()
    bench.scheduler.abort(["far.1"], 0.0)
    bench.add("near", range(100, 110), max_tokens=2)
    assert bench.step().tokens == {"near": 10}, "with a fork fewer"
    bench.scheduler.abort(["far"], 0.0)
    bench.connector.deliver()
    bench.add("more", range(200, 232), max_tokens=2)
    assert "more" in bench.step().tokens


def test_who_was_loaded_behind_what_has_failed_since_is_computed_anew() -> None:
    bench = Bench(PROMPT)
    bench.connector.forget(bench.keys[0])
    bench.add("near", PROMPT[:5], max_tokens=4)
    bench.step()
    bench.add("far", max_tokens=3)
    plan = bench.scheduler.plan(0.0)
    assert bench.scheduler.waiting_for_remote_kv == 1
    result = bench.executor.run(plan)
    bench.scheduler.commit(plan, StepResult(result.tokens, {"near": "not a number"}), 0.0)
    bench.connector.deliver()
    plan = bench.step()
    assert (plan.new[0].request_id, plan.new[0].computed) == ("far", 0)
    assert bench.finish("far") == undisturbed(PROMPT, 1, 3)
