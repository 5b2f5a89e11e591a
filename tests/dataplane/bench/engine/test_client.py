"""What an answer must hold to count, and how it is timed."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.bench.engine.client import Answer, Ask, Caller
from dataplane.bench.engine.prompts import Prompt
from dataplane.bench.errors import SideError
from tests.dataplane.bench.engine.conftest import Start, launch_of

PROMPT = Prompt(tuple(range(20)), None)


def ask(start: Start, *flags: str, asks: tuple[Ask, ...] = (Ask(PROMPT, 4),)) -> list[Answer]:
    server = start("peer", *flags)

    async def all_of() -> list[Answer]:
        async with Caller(server.launch.endpoint) as caller:
            return await caller.all(asks)

    return asyncio.run(all_of())


def test_an_answer_is_timed_from_when_it_was_due(start: Start) -> None:
    early, late = ask(start, "--gap", "0.05", asks=(Ask(PROMPT, 4), Ask(PROMPT, 1, at=0.2)))
    assert early.tokens == 4
    assert early.due < early.first < early.last
    assert early.tpot == pytest.approx((early.last - early.first) / 3)
    assert early.tpot > 0.04, "three gaps between four tokens"
    assert late.due - early.due == pytest.approx(0.2)
    assert late.ttft == late.first - late.due > 0.04
    assert late.tpot == 0.0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--short", "1"), "peer made 3 tokens where 4 were asked for"),
        (("--short", "-2"), "peer made 6 tokens where 4 were asked for"),
        (("--misread", "1"), "peer read 21 prompt tokens of 20"),
        (("--cached", "20"), "peer had 20 tokens of a new prompt in its cache"),
        (("--no-usage",), "no usage at its end"),
        (("--error-event",), "out of blocks"),
        (("--die-after", "0"), "peer broke off"),
    ],
)
def test_what_does_not_hold_what_was_asked_for_is_an_error_and_no_figure(
    start: Start, flags: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(SideError, match=sentence):
        ask(start, *flags)


def test_a_prompt_that_came_before_may_be_cached(start: Start) -> None:
    (answer,) = ask(start, "--cached", "20", asks=(Ask(PROMPT, 4, may_be_cached=True),))
    assert answer.cached == 20


def test_one_bad_answer_among_many_ends_them_all(start: Start) -> None:
    with pytest.raises(SideError, match="broke off"):
        ask(start, "--gap", "0.02", "--die-after", "5", asks=(Ask(PROMPT, 4),) * 8)


def test_a_server_that_takes_texts_is_not_given_ids() -> None:
    async def call() -> None:
        async with Caller(launch_of("peer", takes_ids=False).endpoint) as caller:
            await caller.one(Ask(PROMPT, 4))

    with pytest.raises(SideError, match="takes texts only"):
        asyncio.run(call())
