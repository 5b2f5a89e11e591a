"""The offline API on the real small model: sensible text, stops, order, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dataplane.llm import LLM
from dataplane.protocol import FinishReason, SamplingParams
from dataplane.request import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", threads=1, num_blocks=256, max_model_len=1024)


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    llm.core.check_integrity()
    assert llm.core.stats().gauges.blocks_used == 0
    assert not llm.core.has_work()


def test_a_question_gets_its_answer(llm: LLM) -> None:
    (completion,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert completion.text == "The capital of France is Paris."
    assert completion.finish is FinishReason.STOP
    assert completion.stop_reason is None
    assert completion.token_ids[-1] == 2
    assert llm.tokenizer.decode(completion.token_ids) == completion.text


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    sky, france = llm.chat(
        [
            [{"role": "user", "content": "What colour is the sky?"}],
            [{"role": "user", "content": "What is the capital of France?"}],
        ],
        GREEDY,
    )
    assert "sky" in sky.text
    assert "Paris" in france.text


def test_text_ids_and_params_may_be_mixed(llm: LLM) -> None:
    ids = llm.tokenizer.encode("1, 2, 3, 4,")
    one, two = llm.generate(["1, 2, 3, 4,", ids], [GREEDY, SamplingParams(temperature=0.0, max_tokens=4)])
    assert one.prompt_token_ids == two.prompt_token_ids == ids
    assert (len(one.token_ids), len(two.token_ids)) == (12, 4)
    assert one.text.startswith(two.text)
    assert one.finish is two.finish is FinishReason.LENGTH


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (plain,) = llm.generate(["1, 2, 3, 4,"], GREEDY)
    assert "6" in plain.text
    (stopped,) = llm.generate(["1, 2, 3, 4,"], SamplingParams(temperature=0.0, max_tokens=200, stop=("6", "zzz")))
    assert stopped.text == plain.text[: plain.text.index("6")]
    assert stopped.finish is FinishReason.STOP
    assert stopped.stop_reason == "6"
    assert len(stopped.token_ids) < 12


def test_a_stop_id_is_not_shown(llm: LLM) -> None:
    comma = llm.tokenizer.encode(",")[0]
    (completion,) = llm.generate(
        ["1, 2, 3, 4,"], SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(comma,))
    )
    assert completion.stop_reason == comma
    assert completion.text == " 5"


def test_the_same_prompt_again_is_found_in_the_cache(llm: LLM) -> None:
    prompt = "The river had always been the heart of the town, and nobody could remember a year without it. " * 3
    first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert second.cached_tokens == (len(second.prompt_token_ids) - 1) // 16 * 16 > 0


def test_one_prompt_that_cannot_run_stops_the_call_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(["fine", "word " * 2000], GREEDY)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="2 prompts came with 1"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.generate([]) == []


def test_more_prompts_than_the_queue_holds_are_fed_as_it_empties() -> None:
    small = LLM("smollm2", threads=1, num_blocks=64, max_model_len=256, max_waiting=2, max_num_seqs=2)
    prompts = [f"Number {index}:" for index in range(7)]
    made = small.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2))
    assert [completion.prompt_token_ids for completion in made] == [small.tokenizer.encode(text) for text in prompts]
    assert {len(completion.token_ids) for completion in made} == {2}
    assert small.core.stats().gauges.blocks_used == 0


def test_an_interrupted_call_leaves_no_request_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "_take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    monkeypatch.undo()
    assert llm.generate(["1, 2, 3, 4,"], GREEDY)[0].text.startswith(" 5")
