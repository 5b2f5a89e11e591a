"""Several samples of one prompt: one prefill, shared blocks, seats promised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataplane.protocol import FinishReason, RequestOutput
from dataplane.request import RequestError, RequestState
from dataplane.scheduling.plan import StepResult
from tests.factories.requests import KVExecutor, generated, make_request, make_scheduler, run_to_end, step, undisturbed


def test_forks_start_in_the_step_that_completes_the_prompt() -> None:
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=4)
    scheduler.add(make_request("p", range(6), max_tokens=2, forks=("q", "r")))
    first = step(scheduler)
    assert (first.tokens, [new.request_id for new in first.new], first.samples) == ({"p": 4}, ["p"], set())
    second = step(scheduler)
    assert (second.tokens, second.samples) == ({"p": 2}, {"p", "q", "r"})
    assert [(new.request_id, new.parent, new.seed, new.computed, new.blocks) for new in second.new] == [
        ("q", "p", 1, 6, [1, 2]),
        ("r", "p", 2, 6, [1, 2]),
    ]
    third = step(scheduler)
    assert third.tokens == {"p": 1, "q": 1, "r": 1}
    # The last block is half full and shared by three: two copies, and the last holder writes in place.
    assert [running.replaced for running in third.running] == [(1, 3), (1, 4)]
    assert third.transfers.copies == ((2, 3), (2, 4))
    assert not scheduler.has_work()


@pytest.mark.parametrize(("prompt", "copies"), [(7, 2), (8, 0), (9, 2), (1, 2)])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_copies_are_one_less_than_samples_unless_the_prompt_fills_its_blocks(
    prompt: int, copies: int, steps_in_flight: int
) -> None:
    scheduler = make_scheduler(block_size=4, steps_in_flight=steps_in_flight)
    tokens = list(range(prompt))
    scheduler.add(make_request("p", tokens, max_tokens=6, forks=("q", "r")))
    outputs = run_to_end(scheduler, KVExecutor(4, lambda _: 5))
    assert scheduler.kv.copied == copies
    for number, name in enumerate("pqr"):
        assert generated(outputs[name]) == undisturbed(tokens, 5, 6, seed=number)
    assert scheduler.accounts.scheduling.prompt_tokens == prompt
    assert scheduler.accounts.scheduling.output_tokens == 18
    assert scheduler.kv.pool.used == 0


def test_a_parent_waits_for_seats_for_all_its_samples_and_nobody_takes_them_meanwhile() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    for name in "ab":
        scheduler.add(make_request(name, [ord(name)] * 2, max_tokens=2))
    scheduler.add(make_request("p", range(6), max_tokens=2, forks=("q", "r")))
    scheduler.add(make_request("late", [9, 9], max_tokens=1))
    # Two run, three more would be five; "late" stands behind, though one seat is free.
    assert [step(scheduler).tokens for _ in range(2)] == [{"a": 2, "b": 2}, {"a": 1, "b": 1}]
    plan = step(scheduler)
    assert (plan.tokens, len(plan.new)) == ({"p": 6, "late": 2}, 4)
    assert step(scheduler).tokens == {"p": 1, "q": 1, "r": 1}


def test_forks_can_be_given_up_before_the_prompt_is_computed() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=4)
    scheduler.add(make_request("p", range(6), max_tokens=2, forks=("q", "r")))
    step(scheduler)
    (output,) = scheduler.abort(["q"], 1.0)
    assert (output.request_id, output.finish, output.token_ids) == ("q", FinishReason.ABORT, [])
    scheduler.check_integrity()
    # The seat is free, and the number of the other sample, which its seed comes from, is what it was.
    scheduler.add(make_request("q", [9, 9], max_tokens=1))
    plan = step(scheduler)
    assert plan.tokens == {"p": 2, "q": 2}
    assert [(new.request_id, new.parent, new.seed) for new in plan.new] == [("q", "", 0), ("r", "p", 2)]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_parent_that_ends_before_its_prompt_is_computed_takes_its_forks_with_it(steps: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("p", range(6), forks=("q", "r")))
    for _ in range(steps):
        step(scheduler)
    outputs = scheduler.abort(["p", "q"], 1.0)
    assert [(output.request_id, output.finish) for output in outputs] == [(name, FinishReason.ABORT) for name in "pqr"]
    assert not scheduler.has_work()
    assert scheduler.kv.pool.used == 0
    scheduler.check_integrity()


def test_a_failed_chunk_fails_every_sample_of_the_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("p", range(6), forks=("q",)))
    plan = scheduler.plan(0.0)
    outputs = scheduler.commit(plan, StepResult({}, {"p": "not a number"}), 1.0)
    assert [(output.request_id, output.finish, output.error) for output in outputs] == [
        (name, FinishReason.ERROR, "not a number") for name in "pq"
    ]
    assert not scheduler.has_work()


def test_samples_part_when_they_have_started() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("p", range(6), max_tokens=4, forks=("q", "r")))
    step(scheduler)
    assert [output.request_id for output in scheduler.abort(["p"], 1.0)] == ["p"]
    assert step(scheduler).tokens == {"q": 1, "r": 1}
    assert scheduler.kv.copied == 1


def test_a_parent_that_is_preempted_before_it_forks_keeps_its_forks() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4, caching=False, watermark=0.0, max_num_batched_tokens=8)
    old = make_request("old", range(12), max_tokens=13)
    parent = make_request("p", range(50, 62), max_tokens=3, forks=("q",))
    scheduler.add(old)
    scheduler.add(parent)
    seen: list[str] = []
    outputs = run_to_end(
        scheduler,
        KVExecutor(4, lambda name: 1 if name == "old" else 2),
        each_step=lambda plan: seen.extend(new.request_id for new in plan.new),
    )
    assert parent.preemptions == 1
    assert seen[:3] == ["old", "p", "p"]
    assert generated(outputs["q"]) == undisturbed(range(50, 62), 2, 3, seed=1)


def test_ids_of_forks_are_ids() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("p", range(6), forks=("q",)))
    for request in (
        make_request("q", [1]),
        make_request("x", [1], forks=("q",)),
        make_request("x", [1], forks=("p",)),
        make_request("x", [1], forks=("x",)),
        make_request("x", [1], forks=("y", "y")),
    ):
        with pytest.raises(RequestError) as refused:
            scheduler.add(request)
        assert refused.value.code == "duplicate_request_id"
    assert [request.request_id for request in scheduler.waiting] == ["p"]


def test_more_samples_than_seats_are_refused() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(make_request("p", range(6), forks=("q",)))
    with pytest.raises(RequestError, match="3 samples of one prompt are asked for; this engine runs 2") as refused:
        scheduler.add(make_request("x", range(6), forks=("y", "z")))
    assert refused.value.param == "n"


def test_a_fork_has_times_and_a_count_of_cached_tokens_like_its_parent() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("warm", range(8), max_tokens=1))
    step(scheduler, 1.0)
    scheduler.add(make_request("p", range(8), max_tokens=1, forks=("q",), queued=2.0))
    plan = scheduler.plan(3.0)
    outputs = scheduler.commit(plan, StepResult({"p": [0], "q": [0]}), 4.0)
    assert [(output.request_id, output.cached_tokens) for output in outputs] == [("p", 4), ("q", 4)]
    assert [(output.timing.queued, output.timing.scheduled, output.timing.first_token) for output in outputs] == [
        (2.0, 3.0, 4.0)
    ] * 2
    assert scheduler.accounts.memory.prefix_hits == 4


@pytest.mark.parametrize(("length", "rounds"), [(3, 1), (6, 2)])
def test_what_a_failed_sample_shared_is_cleared_and_never_found(length: int, rounds: int) -> None:
    """The prompt ends inside a block: the fork that is left fills it, but what it begins with is not to be trusted."""
    executor, scheduler = KVExecutor(4, lambda _: 1), make_scheduler(block_size=4)
    prompt, outputs = list(range(length)), list[RequestOutput]()

    def steps(failing: str = "") -> None:
        while scheduler.has_work():
            plan = scheduler.plan(0.0)
            result = executor.run(plan)
            if failing:
                result, failing = replace(result, errors={failing: "not a number"}), ""
            outputs.extend(scheduler.commit(plan, result, 0.0))
            scheduler.check_integrity()

    scheduler.add(make_request("bad", prompt, max_tokens=20, forks=("good",)))
    steps("bad")
    answer = generated(output for output in outputs if output.request_id == "good")
    assert answer == undisturbed(prompt, 1, 20, seed=1)
    for number in range(rounds):
        outputs.clear()
        scheduler.add(make_request(f"next{number}", [*prompt, *answer, 9, 9], max_tokens=5))
        steps()
        assert generated(outputs) == undisturbed([*prompt, *answer, 9, 9], 1, 5)


def test_a_fork_may_be_preempted_alone() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, caching=False, watermark=0.0)
    parent = make_request("p", range(8), max_tokens=5, forks=("q", "r"))
    scheduler.add(parent)
    outputs = run_to_end(scheduler, KVExecutor(4, lambda _: 3))
    assert {name: found[-1].preemptions for name, found in outputs.items()} == {"p": 0, "q": 0, "r": 1}
    for number, name in enumerate("pqr"):
        assert generated(outputs[name]) == undisturbed(range(8), 3, 5, seed=number)
    assert parent.state is RequestState.FINISHED_LENGTH
