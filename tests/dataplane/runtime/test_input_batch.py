"""Rows follow the plans, and a step's inputs are gathered from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dataplane.protocol import SamplingParams
from dataplane.runtime.input_batch import InputBatch
from dataplane.scheduling.plan import NewRequest, Plan, RunningRequest


def new(request_id: str, tokens: list[int], blocks: list[int], computed: int = 0) -> NewRequest:
    return NewRequest(request_id, tokens, len(tokens), SamplingParams(), 0, (), blocks, computed)


def test_a_mixed_step_is_laid_out_decodes_first() -> None:
    batch = InputBatch(max_rows=4, max_len=64, block_size=4)
    batch.update(Plan(1, {"d": 5}, frozenset("d"), new=(new("d", [10, 11, 12, 13, 14], [7, 2]),)))
    batch.append("d", 15)
    plan = Plan(
        2,
        {"d": 1, "p": 3, "e": 1},
        frozenset("de"),
        new=(new("p", list(range(20, 30)), [3, 9, 4], computed=4), new("e", [40], [5])),
        running=(RunningRequest("d", [], 5),),
    )
    batch.update(plan)
    step = batch.gather(plan)
    assert step.request_ids == ["d", "e", "p"]
    assert step.decodes == 2
    assert step.token_ids.tolist() == [15, 40, 24, 25, 26]
    assert step.positions.tolist() == [5, 0, 4, 5, 6]
    assert step.slots.tolist() == [2 * 4 + 1, 5 * 4, 9 * 4, 9 * 4 + 1, 9 * 4 + 2]
    assert step.sampled == ["d", "e"]
    assert step.sample_at.tolist() == [0, 1]
    assert step.tables.tolist() == [[7, 2], [5, 0], [3, 9]]


def test_blocks_are_appended_and_a_reused_row_forgets_the_old_table() -> None:
    batch = InputBatch(max_rows=1, max_len=16, block_size=4)
    batch.update(Plan(1, {"a": 4}, frozenset(), new=(new("a", list(range(9)), [1]),)))
    plan = Plan(2, {"a": 5}, frozenset("a"), running=(RunningRequest("a", [6, 8], 4),))
    batch.update(plan)
    assert batch.gather(plan).tables.tolist() == [[1, 6, 8]]
    again = Plan(3, {"b": 9}, frozenset(), new=(new("b", list(range(9)), [3]),), dropped=("a",))
    batch.update(again)
    assert batch.gather(again).tables.tolist() == [[3, 0, 0]]
    assert len(batch) == 1


def test_who_only_decodes_is_not_named_and_goes_on_where_it_is() -> None:
    batch = InputBatch(max_rows=2, max_len=16, block_size=4)
    first = Plan(1, {"a": 2}, frozenset("a"), new=(new("a", [5, 6], [1]),))
    batch.update(first)
    batch.gather(first)
    for step_number, position in ((2, 2), (3, 3)):
        batch.append("a", 10 + position)
        plan = Plan(step_number, {"a": 1}, frozenset("a"))
        batch.update(plan)
        step = batch.gather(plan)
        assert (step.positions.tolist(), step.token_ids.tolist()) == ([position], [10 + position])


def test_a_gathered_step_is_a_snapshot() -> None:
    batch = InputBatch(max_rows=2, max_len=16, block_size=4)
    plan = Plan(1, {"a": 3}, frozenset("a"), new=(new("a", [5, 6, 7], [1]),))
    batch.update(plan)
    step = batch.gather(plan)
    batch.update(Plan(2, {"b": 2}, frozenset(), new=(new("b", [8, 9], [2]),), dropped=("a",)))
    assert step.token_ids.tolist() == [5, 6, 7]
    assert step.tables.tolist() == [[1]]


def test_dropping_what_never_ran_is_no_error() -> None:
    batch = InputBatch(max_rows=2, max_len=16, block_size=4)
    batch.update(Plan(1, {}, frozenset(), dropped=("ghost",)))
    assert len(batch) == 0


def test_a_row_never_grows_beyond_the_context() -> None:
    batch = InputBatch(max_rows=1, max_len=3, block_size=4)
    batch.update(Plan(1, {"a": 3}, frozenset("a"), new=(new("a", [5, 6, 7], [1]),)))
    batch.append("a", 8)
    assert np.array_equal(batch._tokens[0], [5, 6, 7])


def test_a_replaced_block_takes_its_place_and_new_ones_follow() -> None:
    batch = InputBatch(max_rows=1, max_len=16, block_size=4)
    batch.update(Plan(1, {"a": 6}, frozenset(), new=(new("a", list(range(9)), [1, 2]),)))
    plan = Plan(2, {"a": 3}, frozenset("a"), running=(RunningRequest("a", [8], 6, replaced=(1, 5)),))
    batch.update(plan)
    step = batch.gather(plan)
    assert step.tables.tolist() == [[1, 5, 8]]
    assert step.slots.tolist() == [5 * 4 + 2, 5 * 4 + 3, 8 * 4]


def test_a_fork_has_no_tokens_and_its_parents_place() -> None:
    batch = InputBatch(max_rows=4, max_len=16, block_size=4)
    parent, fork = new("p", [5, 6, 7], [1]), replace(new("f", [5, 6, 7], [1], computed=3), parent="p")
    plan = Plan(1, {"p": 3, "d": 1}, frozenset(["p", "f", "d"]), new=(parent, new("d", [9], [2]), fork))
    batch.update(plan)
    step = batch.gather(plan)
    assert (step.request_ids, step.token_ids.tolist()) == (["d", "p"], [9, 5, 6, 7])
    assert dict(zip(step.sampled, step.sample_at.tolist(), strict=True)) == {"d": 0, "p": 3, "f": 3}
    batch.append("f", 8)
    then = Plan(2, {"f": 1}, frozenset("f"), running=(RunningRequest("f", [], 3),))
    batch.update(then)
    assert batch.gather(then).token_ids.tolist() == [8]


def test_prompt_positions_are_scored_once_each_and_never_output() -> None:
    batch = InputBatch(max_rows=2, max_len=16, block_size=4)
    scored = replace(new("a", [5, 6, 7, 8], [1, 2]), params=SamplingParams(prompt_logprobs=1))
    plans = [
        Plan(1, {"a": 2, "b": 1}, frozenset("b"), new=(scored, new("b", [9], [3]))),
        Plan(2, {"a": 2}, frozenset("a"), running=(RunningRequest("a", [], 2),)),
        Plan(3, {"a": 1}, frozenset("a"), running=(RunningRequest("a", [], 4),)),
    ]
    seen = []
    for plan in plans:
        batch.update(plan)
        seen.append([(span.at, span.targets.tolist(), span.first) for span in batch.gather(plan).scored])
        if "a" in plan.samples:
            batch.append("a", 10)
    assert seen == [[(1, [6, 7], True)], [(0, [8], False)], []]
