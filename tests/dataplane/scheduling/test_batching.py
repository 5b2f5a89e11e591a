"""Which waiting requests join those that run, in each batching mode."""

from __future__ import annotations

import random

import pytest

from dataplane.scheduling.config import Batching, QueueOrder
from dataplane.scheduling.scheduler import Scheduler
from tests.dataplane.scheduling.test_connector import PROMPT, Bench
from tests.factories.requests import ScriptedExecutor, make_request, make_scheduler, run_to_end, step


def add(
    scheduler: Scheduler,
    name: str,
    *,
    prompt: int = 4,
    max_tokens: int = 8,
    queued: float = 0.0,
    forks: tuple[str, ...] = (),
) -> None:
    scheduler.add(make_request(name, [ord(name[0])] * prompt, max_tokens=max_tokens, queued=queued, forks=forks))


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


def test_whoever_comes_later_takes_no_seat_in_a_static_batch() -> None:
    """Not the seat of a member who gave up, nor by its priority that of one who has not begun."""
    scheduler = make_scheduler(batching=Batching.STATIC, batch_size=3, max_num_batched_tokens=4)
    for name in "abc":
        add(scheduler, name, max_tokens=3)
    assert step(scheduler).tokens == {"a": 4}
    scheduler.abort(["b"], 0.0)
    add(scheduler, "late", max_tokens=1)
    scheduler.add(make_request("urgent", range(4), max_tokens=1, priority=-1))
    steps = [step(scheduler).tokens for _ in range(6)]
    assert steps == [{"a": 1, "c": 3}, {"a": 1, "c": 1}, {"c": 1}, {"c": 1}, {"urgent": 4}, {"late": 4}]


def test_a_static_batch_counts_every_sample_of_a_request() -> None:
    scheduler = make_scheduler(batching=Batching.STATIC, batch_size=3)
    add(scheduler, "a", max_tokens=2, forks=("a1",))
    add(scheduler, "b", max_tokens=1)
    assert step(scheduler).tokens == {"a": 4, "b": 4}
    add(scheduler, "c", max_tokens=1, forks=("c1", "c2"))
    add(scheduler, "d", max_tokens=1)
    assert [step(scheduler).tokens for _ in range(3)] == [{"a": 1, "a1": 1}, {"c": 4}, {"d": 4}]


def test_a_request_with_more_samples_than_a_static_batch_has_seats_runs_alone() -> None:
    scheduler = make_scheduler(batching=Batching.STATIC, batch_size=2)
    add(scheduler, "b", max_tokens=1)
    add(scheduler, "a", max_tokens=1, forks=("a1", "a2"))
    add(scheduler, "c", max_tokens=1)
    assert [step(scheduler).tokens for _ in range(3)] == [{"b": 4}, {"a": 4}, {"c": 4}]


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


def test_a_preempted_request_returns_to_its_batch_though_its_kv_comes_from_elsewhere() -> None:
    bench = Bench(PROMPT[:5], batching=Batching.STATIC, batch_size=3, num_blocks=7)
    bench.add("a", [50, 51, 52], max_tokens=20)
    bench.add("c", range(60, 65), max_tokens=7)
    bench.add("p", PROMPT[:5], max_tokens=12)
    assert bench.step().tokens == {"a": 3, "c": 5}
    bench.connector.deliver()
    while not bench.step().loads:
        pass
    assert [request.request_id for request in bench.scheduler.running] == ["a"]
    bench.connector.deliver()
    assert set(bench.step().tokens) == {"a", "p"}


def test_a_batch_lasts_while_the_kv_of_one_of_it_is_loaded() -> None:
    bench = Bench(PROMPT, batching=Batching.STATIC, batch_size=2)
    bench.add("far", max_tokens=1)
    bench.add("near", [50, 51], max_tokens=1)
    bench.add("next", [60, 61], max_tokens=1)
    assert [bench.step().tokens for _ in range(2)] == [{"near": 2}, {}]
    bench.connector.deliver()
    assert [bench.step().tokens for _ in range(2)] == [{"far": 2}, {"next": 2}]


def test_a_batch_ends_when_the_one_whose_kv_is_loaded_gives_up() -> None:
    bench = Bench(PROMPT, batching=Batching.STATIC, batch_size=1)
    bench.add("far", max_tokens=1)
    bench.add("next", [60, 61], max_tokens=1)
    assert bench.step().tokens == {}
    bench.scheduler.abort(["far"], 0.0)
    assert bench.step().tokens == {"next": 2}


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


def test_a_dynamic_batch_counts_every_sample_of_a_request() -> None:
    scheduler = make_scheduler(batching=Batching.DYNAMIC, batch_size=3, batch_window_s=0.5)
    add(scheduler, "a", queued=10.0, max_tokens=1, forks=("a1",))
    assert step(scheduler, 10.0).tokens == {}
    add(scheduler, "b", queued=10.1, max_tokens=1, forks=("b1",))
    assert step(scheduler, 10.1).tokens == {"a": 4}
    add(scheduler, "c", queued=10.2, max_tokens=1)
    assert step(scheduler, 10.2).tokens == {"b": 4, "c": 4}


def test_the_window_of_a_dynamic_batch_is_that_of_those_who_wait() -> None:
    scheduler = make_scheduler(batching=Batching.DYNAMIC, batch_size=3, batch_window_s=0.5)
    add(scheduler, "a", queued=10.0)
    assert step(scheduler, 10.0).tokens == {}
    scheduler.abort(["a"], 10.1)
    add(scheduler, "b", queued=20.0, max_tokens=1)
    assert step(scheduler, 20.0).tokens == {}
    assert scheduler.wakes_at() == 20.5
    scheduler.add(make_request("urgent", range(4), max_tokens=1, queued=20.4, priority=-1))
    assert step(scheduler, 20.4).tokens == {}
    assert step(scheduler, 20.5).tokens == {"urgent": 4, "b": 4}


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


def test_a_bucket_is_as_old_as_the_first_of_it_that_was_queued() -> None:
    scheduler = make_scheduler(batching=Batching.SELECTIVE, bucket_ageing_s=5.0)
    for name, prompt, queued in (("young", 4, 5.0), ("old", 4, 0.0), ("long", 100, 4.0), ("longer", 101, 4.0)):
        add(scheduler, name, prompt=prompt, queued=queued)
    add(scheduler, "longest", prompt=102, queued=4.0)
    assert step(scheduler, 6.0).tokens == {"old": 4, "young": 4}


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


@pytest.mark.parametrize("order", QueueOrder)
def test_one_step_admits_a_bucket_in_the_queues_order(order: QueueOrder) -> None:
    scheduler = make_scheduler(batching=Batching.SELECTIVE, bucket_ageing_s=9.0, order=order)
    draw = random.Random(1)
    for index in range(40):
        tag, queued, tenant = draw.random(), draw.random(), f"tenant {draw.randrange(5)}"
        prompt = [index] * (4 if index % 2 else 100)
        scheduler.add(make_request(str(index), prompt, queued=queued, fair_tag=tag, tenant=tenant))
    add(scheduler, "more")
    expected = [request.request_id for request in scheduler.waiting if request.prompt_len == 4]
    assert len(expected) == 21
    assert list(step(scheduler, 1.0).tokens) == expected


@pytest.mark.parametrize("batching", [Batching.STATIC, Batching.DYNAMIC])
def test_a_batch_that_is_filled_over_several_steps_keeps_its_seats_though_the_first_have_ended(
    batching: Batching,
) -> None:
    scheduler = make_scheduler(
        batching=batching, batch_size=2, batch_window_s=10.0, max_num_batched_tokens=4, caching=False
    )
    for name in "ab":
        add(scheduler, name, max_tokens=1)
    assert step(scheduler, 0.0).tokens == {"a": 4}
    add(scheduler, "c", max_tokens=1, queued=-1.0)
    assert step(scheduler, 0.1).tokens == {"b": 4}


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


def test_a_request_whose_kv_was_loaded_goes_before_those_that_never_began() -> None:
    bench = Bench(PROMPT, batching=Batching.SELECTIVE, max_num_seqs=1, bucket_ageing_s=9.0)
    bench.add("far", max_tokens=1)
    assert bench.step().tokens == {}
    for name in ("a", "b", "c"):
        bench.add(name, [60, 61], max_tokens=1)
    assert bench.step().tokens == {"a": 2}
    bench.connector.deliver()
    assert [bench.step().tokens for _ in range(2)] == [{"far": 2}, {"b": 2}]


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
