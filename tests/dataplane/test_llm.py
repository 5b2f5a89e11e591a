"""The offline API on the real small model: sensible text, stops, order, nothing left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLParserLimits

from controlplane.local.display import DEMO_QUESTION, DEMO_TOKENS
from dataplane.llm import DEFAULT_PARAMS, LLM, Completion
from dataplane.protocol import EngineRequest, FinishReason, Grammar, GrammarKind, SamplingParams
from dataplane.request import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", threads=1, weights="float32", num_blocks=256, max_model_len=1024)


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


@pytest.mark.parametrize("weights", ["float32", "blocks", "int8"])
def test_the_demo_question_is_no_near_tie_in_any_format(weights: str) -> None:
    """What a newcomer pastes is answered, and ends, whichever way the demo model is run."""
    params = SamplingParams(temperature=0.0, max_tokens=DEMO_TOKENS, logprobs=2)
    with LLM("smollm2", weights=weights, num_blocks=64, max_model_len=256) as model:
        (completion,) = model.chat([{"role": "user", "content": DEMO_QUESTION}], params)
    assert completion.text == "The capital of France is Paris."
    assert completion.finish is FinishReason.STOP
    assert completion.logprobs is not None
    margins = [first - second for scored in completion.logprobs for (_, first), (_, second) in [scored.top]]
    assert min(margins) > 1


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


def test_prompts_without_params_do_not_go_on_to_the_end_of_the_context(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEFAULT_PARAMS.max_tokens == 128
    monkeypatch.setattr("dataplane.llm.DEFAULT_PARAMS", SamplingParams(max_tokens=3, ignore_eos=True))
    (completion,) = llm.generate(["Once upon a time"])
    assert (len(completion.token_ids), completion.finish) == (3, FinishReason.LENGTH)


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


def test_n_completions_of_each_prompt_stand_together_and_draw_with_seeds_in_a_row(llm: LLM) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, seed=seed, max_tokens=10, ignore_eos=True)

    prompts = ["The best thing about the sea is", "My favourite colour is", "In the year 2050, people"]
    made = llm.generate(prompts, [params(5), params(50), params(500)], n=3)
    assert [completion.prompt_token_ids for completion in made] == [
        llm.tokenizer.encode(prompt) for prompt in prompts for _ in range(3)
    ]
    apart = [
        llm.generate([prompt], params(seed + k))[0]
        for prompt, seed in zip(prompts, (5, 50, 500), strict=True)
        for k in range(3)
    ]
    assert [completion.text for completion in made] == [completion.text for completion in apart]
    assert len({completion.text for completion in made}) == 9


def test_each_sample_stops_at_its_own_stop_string(llm: LLM) -> None:
    params = SamplingParams(temperature=1.3, seed=3, max_tokens=40, stop=("e", "."))
    made = llm.generate(["Once upon a time"], params, n=4)
    assert {completion.finish for completion in made} == {FinishReason.STOP}
    assert all(completion.stop_reason in ("e", ".") for completion in made)
    assert not any("e" in completion.text or "." in completion.text for completion in made)
    assert len({len(completion.token_ids) for completion in made}) > 1


def test_a_closed_model_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with LLM("smollm2", threads=1, num_blocks=64, max_model_len=256, steps_in_flight=2) as overlapped:
        assert len(overlapped.generate(["a"], GREEDY)[0].token_ids) == 12
        (steps,) = set(threading.enumerate()) - before
    assert not steps.is_alive()


@pytest.mark.parametrize("n", [0, -1, 129])
def test_n_has_its_limits(llm: LLM, n: int) -> None:
    with pytest.raises(RequestError, match="n must be between 1 and 128") as refused:
        llm.generate(["a"], GREEDY, n=n)
    assert refused.value.param == "n"


def test_log_probabilities_come_with_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=4, prompt_logprobs=1)
    asked, plain = (llm.generate(["The capital of France is"], chosen)[0] for chosen in (params, GREEDY))
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)
    assert asked.logprobs is not None
    assert asked.prompt_logprobs is not None
    assert [scored.token_id for scored in asked.logprobs] == asked.token_ids
    assert {scored.rank for scored in asked.logprobs} == {1}
    assert all(scored.top[0] == (scored.token_id, scored.logprob) for scored in asked.logprobs)
    assert {len(scored.top) for scored in asked.logprobs} == {4}
    assert asked.prompt_logprobs[0] is None
    assert [scored.token_id for scored in asked.prompt_logprobs[1:] if scored] == asked.prompt_token_ids[1:]
    assert all(scored.logprob < 0 for scored in asked.prompt_logprobs[1:] if scored)


def test_a_bias_and_a_bad_word_change_the_answer(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    paris = llm.tokenizer.encode(" Paris")[0]
    (plain,) = llm.chat(question, GREEDY)
    assert plain.text == "The capital of France is Paris."
    for params in ({"logit_bias": {paris: -100.0}}, {"bad_words": ((paris,),)}):
        (changed,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=12, **params))
        assert paris not in changed.token_ids
        assert changed.text.startswith("The capital of France is")
    phrase = tuple(llm.tokenizer.encode(" of France"))
    (changed,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=12, bad_words=(phrase,)))
    assert changed.text.startswith("The capital of")
    assert " of France" not in changed.text


def test_an_answer_is_held_to_its_grammar_and_ends_with_it(llm: LLM) -> None:
    def answer(kind: GrammarKind, text: str, temperature: float = 0.0) -> Completion:
        params = SamplingParams(
            temperature=temperature, seed=4, max_tokens=80, logprobs=0, grammar=Grammar(kind=kind, text=text)
        )
        return llm.chat([{"role": "user", "content": "Name a city and how many people live there."}], params)[0]

    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99999}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    for temperature in (0.0, 1.0):
        made = answer(GrammarKind.JSON_SCHEMA, json.dumps(schema), temperature)
        assert made.finish is FinishReason.STOP
        found = json.loads(made.text)
        assert set(found) == {"city", "people"}
        assert isinstance(found["people"], int)
    chosen = answer(GrammarKind.CHOICE, json.dumps(["qqq zebra", "qqq yak"]))
    assert chosen.text in ("qqq zebra", "qqq yak")
    assert chosen.logprobs is not None
    assert max(scored.rank for scored in chosen.logprobs) > 100, "scores are the model's own, not the masked ones"


def test_a_grammar_that_cannot_be_is_refused_before_anything_runs(llm: LLM) -> None:
    broken = SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, text="(a"))
    with pytest.raises(RequestError) as refused:
        llm.generate(["fine", "not fine"], [GREEDY, broken])
    assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (["a"], "must be a text or a list of token ids"),
        ([1.5], "must be a text or a list of token ids"),
        (None, "must be a text or a list of token ids"),
        ([], "the prompt is empty"),
        ([5, 10**6], "prompt token ids must be between 0 and 49151"),
        ([-1], "prompt token ids must be between 0 and 49151"),
        ("word " * 2000, "which leaves no room for an answer"),
    ],
)
def test_a_prompt_that_is_none_is_named(llm: LLM, prompt: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(["fine", prompt], GREEDY)
    assert refused.value.message.startswith("prompts[1]")
    assert sentence in refused.value.message
    assert refused.value.param == "prompt"


def chosen(choices: list[str], **params: Any) -> SamplingParams:
    grammar = Grammar(kind=GrammarKind.CHOICE, text=json.dumps(choices))
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "grammar": grammar, **params})


def test_min_tokens_do_not_prolong_an_answer_that_its_grammar_has_finished(llm: LLM) -> None:
    (yes,) = llm.tokenizer.encode("yes")
    (completion,) = llm.generate(["Is water wet?"], chosen(["yes"], min_tokens=9))
    assert (completion.text, completion.finish) == ("yes", FinishReason.STOP)
    assert completion.token_ids == [yes, *completion.token_ids[-1:]]
    assert len(completion.token_ids) == 2


def test_what_a_request_forbids_of_all_that_it_requires_is_refused_before_it_runs(llm: LLM) -> None:
    a, b = (llm.tokenizer.encode(letter)[0] for letter in "ab")
    conflicts = [
        (chosen(["a"], bad_words=((a,),)), "bad_words"),
        (chosen(["a", "b"], stop_token_ids=(a, b), min_tokens=2), "structured_outputs"),
    ]
    for params, param in conflicts:
        with pytest.raises(RequestError, match="no token is allowed here") as refused:
            llm.generate(["fine", "Is water wet?"], [GREEDY, params])
        assert (refused.value.code, refused.value.param) == ("constraint_unsatisfiable", param)
    (completion,) = llm.generate(["Is water wet?"], chosen(["a", "b"], bad_words=((a,),)))
    assert completion.text == "b"


def test_a_conflict_in_the_middle_of_an_answer_ends_it_as_a_refusal_and_harms_no_cache(llm: LLM) -> None:
    prompt = "It had rained all day long and nobody knew when it would end, for the sky was as grey as a stone. " * 2
    dog = llm.tokenizer.encode(" dog")
    params = chosen(["a dog"], bad_words=(tuple(dog),))
    (completion,) = llm.generate([prompt], params)
    assert (completion.text, completion.finish) == ("a", FinishReason.ERROR)
    assert completion.error is not None
    assert "bad_words" in completion.error
    (again,) = llm.generate([prompt], GREEDY)
    assert again.cached_tokens == (len(again.prompt_token_ids) - 1) // 16 * 16 > 0


def test_a_grammar_that_meets_its_bound_on_work_in_an_answer_is_a_refusal_too(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.core._grammars, "_limits", LLParserLimits(step_lexer_fuel=300, verbose_errors=False))
    hard = Grammar(kind=GrammarKind.REGEX, text="one two three four five six seven (.*a.*c){30}")
    params = SamplingParams(temperature=0.0, max_tokens=20, grammar=hard)
    llm.core.add(EngineRequest(request_id="hard", prompt_token_ids=[5, 6], params=params, arrived_at=0.0))
    outputs = [output for _ in range(20) for output in llm.core.step()]
    assert len(outputs) == 8
    last = outputs[-1]
    assert (last.finish, last.error_code, last.error_param) == (
        FinishReason.ERROR,
        "constraint_unsatisfiable",
        "structured_outputs",
    )
    assert last.error is not None
    assert last.error.startswith("the text cannot go on in its grammar: lexer error")
