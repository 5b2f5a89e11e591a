"""How many blocks an admission takes, and how many it leaves."""

from __future__ import annotations

import pytest

from dataplane.request import Request, RequestError
from dataplane.scheduling.config import Capacity
from tests.factories.requests import ScriptedExecutor, make_request, make_scheduler, run_to_end, step


def test_reserve_max_takes_every_block_at_admission_and_none_later() -> None:
    scheduler = make_scheduler(block_size=4, capacity=Capacity.RESERVE_MAX, max_num_batched_tokens=5)
    scheduler.add(make_request("a", range(7), max_tokens=6))
    first = step(scheduler)
    assert (first.tokens, first.new[0].blocks) == ({"a": 5}, [1, 2, 3])
    assert not any(changed.new_blocks for _ in range(6) for changed in step(scheduler).running)
    assert not scheduler.has_work()


def test_reserve_max_never_preempts_and_runs_fewer_at_once() -> None:
    running: dict[Capacity, int] = {}
    preempted: dict[Capacity, int] = {}
    for capacity in Capacity:
        scheduler = make_scheduler(num_blocks=33, block_size=4, caching=False, watermark=0.0, capacity=capacity)
        for index in range(12):
            scheduler.add(make_request(str(index), [index] * 15, max_tokens=12))
        most = 0

        def watch(plan: object, scheduler: object = scheduler) -> None:
            nonlocal most
            most = max(most, len(scheduler.running))  # type: ignore[attr-defined]  # bound per case

        run_to_end(scheduler, ScriptedExecutor(lambda _, position: position), each_step=watch)
        running[capacity] = most
        preempted[capacity] = sum(scheduler.accounts.scheduling.preemptions.values())
    assert running == {Capacity.ON_DEMAND: 8, Capacity.RESERVE_MAX: 4}
    assert preempted[Capacity.RESERVE_MAX] == 0
    assert preempted[Capacity.ON_DEMAND] > 0


def power_of_two(request: Request) -> int:
    """The prompt, and the output so far rounded up (Orca's Pow2, as PagedAttention measures it)."""
    return request.prompt_len + (1 << (request.wanted - request.prompt_len).bit_length())


def test_another_reservation_may_grow_with_the_request() -> None:
    scheduler = make_scheduler(block_size=1, reserve=power_of_two)
    scheduler.add(make_request("a", range(4), max_tokens=9))
    held = []
    for _ in range(6):
        step(scheduler)
        held.append(scheduler.kv.held("a"))
    assert held == [5, 6, 8, 8, 12, 12]


def test_a_reservation_larger_than_the_pool_is_cut_to_it() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, reserve=lambda _: 1000)
    scheduler.add(make_request("a", range(4), max_tokens=3))
    assert step(scheduler).new[0].blocks == [1, 2, 3, 4]


def test_forks_are_admitted_only_with_room_for_all_their_tails() -> None:
    """Prompt of six, four tokens of KV more: blocks of four, so one is shared and each sample has a tail of two."""
    scheduler = make_scheduler(num_blocks=11, block_size=4, watermark=0.0, capacity=Capacity.RESERVE_MAX)
    executor = ScriptedExecutor(lambda _, position: position)
    steps: list[dict[str, int]] = []
    scheduler.add(make_request("other", range(50, 62), max_tokens=5))
    scheduler.add(make_request("p", range(6), max_tokens=5, forks=("q", "r")))
    scheduler.add(make_request("late", range(90, 94), max_tokens=9))
    run_to_end(scheduler, executor, each_step=lambda plan: steps.append(plan.tokens))
    # "other" holds four of ten blocks and "p" wants seven, so it waits for all of them; "late" waits for three.
    alone = [{"other": 12}, *[{"other": 1}] * 4]
    assert steps[:6] == [*alone, {"p": 6, "late": 4}]
    assert steps[6:10] == [{"p": 1, "late": 1, "q": 1, "r": 1}] * 4
    assert scheduler.accounts.scheduling.preemptions == {}
    assert scheduler.kv.copied == 2


def test_what_was_promised_to_a_fork_is_not_given_to_a_newcomer() -> None:
    scheduler = make_scheduler(
        num_blocks=8, block_size=4, watermark=0.0, capacity=Capacity.RESERVE_MAX, max_num_batched_tokens=4
    )
    scheduler.add(make_request("p", range(6), max_tokens=5, forks=("q", "r")))
    assert step(scheduler).tokens == {"p": 4}
    # Three blocks are held and four are free, all of them promised.
    scheduler.add(make_request("late", [9], max_tokens=1))
    assert step(scheduler).tokens == {"p": 2}
    assert scheduler.kv.free_blocks == 2
    assert set(step(scheduler).tokens) == {"p", "q", "r"}


def test_forks_whose_tails_can_never_fit_are_refused_where_they_are_reserved() -> None:
    for capacity, refused in ((Capacity.ON_DEMAND, False), (Capacity.RESERVE_MAX, True)):
        scheduler = make_scheduler(num_blocks=7, block_size=4, capacity=capacity)
        request = make_request("p", range(6), max_tokens=5, forks=("q", "r"))
        if refused:
            with pytest.raises(RequestError, match="holds 24 tokens; the request may need 28"):
                scheduler.add(request)
        else:
            scheduler.add(request)
        assert scheduler.has_work() != refused
