"""Which waiting requests join those that run, in each batching mode."""

from __future__ import annotations

import pytest

from dataplane.scheduling.config import Batching, QueueOrder
from dataplane.scheduling.scheduler import Scheduler
from tests.factories.requests import ScriptedExecutor, make_request, make_scheduler, run_to_end, step


def add(scheduler: Scheduler, name: str, *, prompt: int = 4, max_tokens: int = 8, queued: float = 0.0) -> None:
    scheduler.add(make_request(name, [ord(name[0])] * prompt, max_tokens=max_tokens, queued=queued))


def test_a_static_batch_ends_before_the_next_begins() -> None:
    scheduler = make_scheduler(batching=Batching.STATIC, batch_size=2)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 2)):
        add(scheduler, name, max_tokens=max_tokens)
    assert [step(scheduler).tokens for _ in range(5)] == [{"a": 4, "b": 4}, {"b": 1}, {"b": 1}, {"c": 4}, {"c": 1}]


def test_a_static_batch_is_filled_over_as_many_steps_as_the_budget_takes() -> None:
    scheduler = make_scheduler(batching=Batching.STATIC, batch_size=2, max_num_batched_tokens=5)
    for name in "abc":
        add(scheduler, name)
    assert [step(scheduler).tokens for _ in range(3)] == [{"a": 4, "b": 1}, {"a": 1, "b": 3}, {"a": 1, "b": 1}]


def test_a_static_batch_takes_whoever_waits_when_it_begins() -> None:
    scheduler = make_scheduler(batching=Batching.STATIC, batch_size=3)
    add(scheduler, "a", max_tokens=3)
    assert step(scheduler).tokens == {"a": 4}
    add(scheduler, "b")
    assert [step(scheduler).tokens for _ in range(3)] == [{"a": 1}, {"a": 1}, {"b": 4}]


def test_a_static_batch_is_closed_when_memory_is_full() -> None:
    scheduler = make_scheduler(batching=Batching.STATIC, num_blocks=6, block_size=4, watermark=0.0)
    add(scheduler, "a", prompt=8, max_tokens=2)
    add(scheduler, "b", prompt=16, max_tokens=1)
    add(scheduler, "c", prompt=4, max_tokens=1)
    assert [step(scheduler).tokens for _ in range(3)] == [{"a": 8}, {"a": 1}, {"b": 16, "c": 4}]


def test_a_preempted_request_returns_to_its_batch_though_it_is_closed() -> None:
    scheduler = make_scheduler(
        batching=Batching.STATIC, batch_size=2, num_blocks=5, block_size=4, caching=False, watermark=0.0
    )
    add(scheduler, "a", prompt=8, max_tokens=2)
    add(scheduler, "b", prompt=8, max_tokens=3)
    add(scheduler, "c", prompt=4, max_tokens=1)
    steps = [step(scheduler).tokens for _ in range(5)]
    assert steps == [{"a": 8, "b": 8}, {"a": 1}, {"b": 9}, {"b": 1}, {"c": 4}]


def test_a_dynamic_batch_begins_when_its_window_has_passed() -> None:
    scheduler = make_scheduler(batching=Batching.DYNAMIC, batch_size=3, batch_window_s=0.5)
    add(scheduler, "a", queued=10.0, max_tokens=1)
    assert step(scheduler, 10.0).tokens == {}
    assert scheduler.wakes_at() == 10.5
    add(scheduler, "b", queued=10.4, max_tokens=1)
    assert step(scheduler, 10.4).tokens == {}
    assert step(scheduler, 10.5).tokens == {"a": 4, "b": 4}
    assert scheduler.wakes_at() is None


def test_a_dynamic_batch_begins_at_once_when_it_is_full() -> None:
    scheduler = make_scheduler(batching=Batching.DYNAMIC, batch_size=2, batch_window_s=0.5)
    add(scheduler, "a", queued=10.0, max_tokens=2)
    add(scheduler, "b", queued=10.1, max_tokens=1)
    add(scheduler, "c", queued=10.1, max_tokens=1)
    assert step(scheduler, 10.1).tokens == {"a": 4, "b": 4}
    assert step(scheduler, 10.2).tokens == {"a": 1}
    assert step(scheduler, 10.3).tokens == {}
    assert step(scheduler, 10.6).tokens == {"c": 4}


def test_a_selective_step_admits_requests_of_one_length_class() -> None:
    scheduler = make_scheduler(batching=Batching.SELECTIVE, bucket_ageing_s=9.0)
    add(scheduler, "long", prompt=100)
    add(scheduler, "s", prompt=4)
    add(scheduler, "t", prompt=6)
    assert step(scheduler).tokens == {"s": 4, "t": 6}
    assert step(scheduler).tokens == {"s": 1, "t": 1, "long": 100}


def test_a_selective_step_keeps_cache_hits_and_misses_apart() -> None:
    scheduler = make_scheduler(batching=Batching.SELECTIVE, block_size=4)
    prompts = {"seed": range(33), "hit": [*range(32), 99], "miss": range(200, 233), "other": range(300, 333)}
    for name in ("seed",):
        scheduler.add(make_request(name, prompts[name], max_tokens=1))
    assert step(scheduler).tokens == {"seed": 33}
    for name in ("hit", "miss", "other"):
        scheduler.add(make_request(name, prompts[name], max_tokens=1))
    assert step(scheduler).tokens == {"miss": 33, "other": 33}
    assert step(scheduler).tokens == {"hit": 1}


@pytest.mark.parametrize(("ageing", "served_at"), [(100.0, None), (3.0, 3)])
def test_ageing_keeps_a_bucket_from_starving(ageing: float, served_at: int | None) -> None:
    """One long request against two short ones that arrive each second: the short bucket is always fuller."""
    scheduler = make_scheduler(batching=Batching.SELECTIVE, bucket_ageing_s=ageing)
    add(scheduler, "long", prompt=100, max_tokens=1)
    served = None
    for now in range(20):
        for name in (f"x{now}", f"y{now}"):
            add(scheduler, name, max_tokens=1, queued=float(now))
        if "long" in step(scheduler, float(now)).tokens:
            served = now
            break
    assert served == served_at


def test_no_batch_begins_while_one_of_the_last_is_preempted_whatever_its_priority() -> None:
    scheduler = make_scheduler(
        batching=Batching.STATIC, batch_size=2, num_blocks=6, block_size=4, caching=False, watermark=0.0
    )
    for name, max_tokens in (("a", 6), ("b", 12)):
        scheduler.add(make_request(name, range(8), max_tokens=max_tokens, priority=1))
    began: list[list[str]] = []
    for now in range(40):
        if now == 3:
            scheduler.add(make_request("urgent", range(16), max_tokens=2, queued=3.0))
        plan = step(scheduler, float(now))
        began += [[new.request_id for new in plan.new]] if plan.new else []
    assert began == [["a", "b"], ["b"], ["urgent"]]


def test_a_bucket_is_served_in_the_queues_order() -> None:
    """The tags a gateway supplied count among those that are alike, and choose the bucket once somebody is old."""
    scheduler = make_scheduler(
        batching=Batching.SELECTIVE, bucket_ageing_s=3.0, order=QueueOrder.FAIR_TAG, max_num_seqs=1
    )
    for name, prompt, tag in (("late", 4, 9.0), ("long", 100, 1.0), ("soon", 4, 2.0), ("next", 4, 5.0)):
        scheduler.add(make_request(name, [ord(name[0])] * prompt, max_tokens=1, fair_tag=tag))
    admitted = [list(step(scheduler, now).tokens) for now in (1.0, 2.0, 3.0, 4.0)]
    assert admitted == [["soon"], ["next"], ["long"], ["late"]]


def test_preempted_requests_are_a_bucket_that_goes_first() -> None:
    scheduler = make_scheduler(
        batching=Batching.SELECTIVE, num_blocks=5, block_size=4, caching=False, watermark=0.0, bucket_ageing_s=0.0
    )
    add(scheduler, "a", prompt=8, max_tokens=2)
    add(scheduler, "b", prompt=8, max_tokens=2)
    assert [step(scheduler).tokens for _ in range(2)] == [{"a": 8, "b": 8}, {"a": 1}]
    for name in ("c", "d"):
        add(scheduler, name, prompt=4, max_tokens=1)
    assert step(scheduler).tokens == {"b": 9}


def steps_until_done(batching: Batching, lengths: list[int]) -> int:
    scheduler = make_scheduler(batching=batching, max_num_seqs=4, max_num_batched_tokens=1000)
    for index, length in enumerate(lengths):
        add(scheduler, f"{index}", max_tokens=length)
    run_to_end(scheduler, ScriptedExecutor(lambda _, position: position))
    return scheduler.accounts.scheduling.steps


def test_continuous_batching_gains_where_lengths_differ_and_nothing_where_they_are_equal() -> None:
    equal, mixed = [8] * 16, [1, 2, 4, 25] * 4
    assert steps_until_done(Batching.CONTINUOUS, equal) == steps_until_done(Batching.STATIC, equal) == 32
    assert steps_until_done(Batching.STATIC, mixed) == 100
    assert steps_until_done(Batching.CONTINUOUS, mixed) < 50
