"""The reference cases of the scheduler, by their label (DOMAIN 2.3; S4 belongs to speculation)."""

from __future__ import annotations

import pytest

from dataplane.protocol import FinishReason, SamplingParams
from dataplane.request import RequestState
from dataplane.scheduling.connector import LocalConnector
from dataplane.scheduling.plan import StepResult
from tests.factories.requests import (
    KVExecutor,
    ScriptedExecutor,
    fold_all,
    generated,
    make_request,
    make_scheduler,
    run_to_end,
    step,
    undisturbed,
)


def test_s1_long_prefills_share_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=1024, long_prefill_threshold=400)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)] * 800))
    assert step(scheduler).tokens == {"a": 400, "b": 400, "c": 224}
    assert step(scheduler).tokens == {"a": 400, "b": 400, "c": 224}
    assert step(scheduler).tokens == {"a": 1, "b": 1, "c": 352}


def test_s2_a_second_plan_may_precede_the_first_result() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=512)
    scheduler.add(make_request("a", range(512)))
    scheduler.add(make_request("b", range(1000, 1512)))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert (first.tokens, second.tokens) == ({"a": 512}, {"b": 512})
    scheduler.commit(first, StepResult({"a": [0]}), 1.0)
    assert scheduler.plan(1.0).tokens == {"a": 1}


@pytest.mark.parametrize(
    ("params", "sampled", "kept", "finish", "stop_reason"),
    [
        ({"max_tokens": 10}, [10, 2], [10, 2], FinishReason.STOP, None),
        ({"max_tokens": 10, "stop_token_ids": (42,)}, [10, 42, 11, 12], [10, 42], FinishReason.STOP, 42),
        ({"max_tokens": 2}, [10, 11, 12], [10, 11], FinishReason.LENGTH, None),
        ({"max_tokens": 10, "ignore_eos": True}, [10, 2, 11], [10, 2, 11], None, None),
        ({"max_tokens": 10, "min_tokens": 3}, [10, 2, 11], [10, 2, 11], None, None),
    ],
)
def test_s3_what_ends_a_request(
    params: dict[str, object], sampled: list[int], kept: list[int], finish: FinishReason | None, stop_reason: int | None
) -> None:
    scheduler = make_scheduler(eos=[2])
    scheduler.add(make_request("a", range(5), params=SamplingParams(temperature=0.0, **params)))  # type: ignore[arg-type]  # table of fields
    plan = scheduler.plan(0.0)
    (output,) = scheduler.commit(plan, StepResult({"a": sampled}), 1.0)
    assert output.token_ids == kept
    assert output.finish == finish
    assert output.stop_reason == stop_reason
    assert scheduler.has_work() == (finish is None)


def test_s5_a_preempted_request_with_external_kv_restarts_with_a_hit() -> None:
    """Two requests, five usable blocks of four: the first block of each prompt lies in a connector."""
    prompts = {"old": [1, 1, 1, 1, 5, 5, 5], "new": [2, 2, 2, 2, 6, 6, 6]}
    executor = KVExecutor(4, lambda _: 1)
    connector = executor.connector = LocalConnector(4, executor.memory.load)
    scheduler = make_scheduler(num_blocks=6, block_size=4, watermark=0.0, connector=connector)
    for name, prompt in prompts.items():
        request = make_request(name, prompt, max_tokens=4)
        scheduler.kv.match(request)
        digests = [fold_all(1, prompt[: end + 1]) for end in range(4)]
        connector.store(request.block_hashes[0], dict(enumerate(digests)))
        scheduler.add(request)

    loading = scheduler.plan(0.0)
    executor.run(loading)
    assert loading.tokens == {}
    assert scheduler.waiting_for_remote_kv == 2
    connector.deliver()
    steps, outputs = [], {"old": [], "new": []}
    while scheduler.has_work():
        plan = scheduler.plan(1.0)
        steps.append(plan.tokens)
        for output in scheduler.commit(plan, executor.run(plan), 1.0):
            outputs[output.request_id].append(output)
        scheduler.check_integrity()
        if len(steps) == 3:
            assert scheduler.waiting.peek().state is RequestState.PREEMPTED
    # Both compute what the connector had not, then a token each; the third takes the last block, and "new" gives way.
    # It restarts with all of its full blocks found in the cache.
    assert steps == [{"old": 3, "new": 3}, {"old": 1, "new": 1}, {"old": 1}, {"old": 1}, {"new": 1}, {"new": 1}]
    assert [outputs[name][-1].finish for name in prompts] == [FinishReason.LENGTH] * 2
    assert [outputs[name][-1].preemptions for name in prompts] == [0, 1]
    assert [outputs[name][0].cached_tokens for name in prompts] == [4, 4]
    assert {name: generated(outputs[name]) for name in prompts} == {
        name: undisturbed(prompt, 1, 4) for name, prompt in prompts.items()
    }
    assert scheduler.kv.free_blocks == 5


def test_s6_nothing_is_left_after_five_requests() -> None:
    scheduler = make_scheduler(num_blocks=101)
    for index in range(5):
        scheduler.add(make_request(str(index), [index] * 50, max_tokens=20))
    outputs = run_to_end(scheduler, ScriptedExecutor(lambda _, position: position))
    assert {request_id: len(generated(found)) for request_id, found in outputs.items()} == {
        str(i): 20 for i in range(5)
    }
    assert scheduler.kv.free_blocks == 100
    assert [block.refs for block in scheduler.kv.pool.blocks[1:]] == [0] * 100
