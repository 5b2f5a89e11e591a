"""What the real SmolLM2 answers through a replica: choices, log-probabilities, structure and tools."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.dataplane.replica.harness import (
    MODEL,
    TOKEN,
    Client,
    Process,
    smollm2_tokenizer,
    sse,
)
from tests.dataplane.replica.real import PARIS, every_block_is_free


async def test_several_prompts_are_several_choices(client: Client) -> None:
    tokenizer = smollm2_tokenizer()
    prompts = ["Once upon a time", "The sky is"]
    bodies = []
    for prompt in (prompts, [tokenizer.encode(text) for text in prompts]):
        request = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 5}
        async with client.post("/v1/completions", request) as answer:
            assert answer.status == 200
            bodies.append(json.loads(await answer.read()))
    texts, ids = bodies
    assert [choice["index"] for choice in texts["choices"]] == [0, 1]
    assert [choice["text"] for choice in texts["choices"]] == [choice["text"] for choice in ids["choices"]]
    assert texts["usage"]["completion_tokens"] == 10
    request = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 5, "stream": True}
    async with client.post("/v1/completions", request) as stream:
        chunks = sse((await stream.read()).decode())[:-1]
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == texts["choices"][index]["text"]
        assert [choice["finish_reason"] for choice in own][-1] == "length"


async def test_a_stop_string_ends_the_answer_and_the_request(client: Client) -> None:
    async with client.chat(PARIS, temperature=0, max_tokens=50, stop=[" France"]) as answer:
        body = json.loads(await answer.read())
    assert body["choices"][0]["message"]["content"] == "The capital of"
    assert body["choices"][0]["finish_reason"] == "stop"
    await every_block_is_free(client)


SEA = "What does the sea look like?"
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 12}


async def test_n_choices_are_the_samples_of_as_many_requests(client: Client) -> None:
    """The k-th draws with the seed plus k, and the prompt is computed once and charged once."""
    async with client.chat(SEA, n=3, seed=100, **SAMPLED) as answer:
        together = json.loads(await answer.read())
    alone = []
    for seed in (100, 101, 102):
        async with client.chat(SEA, seed=seed, **SAMPLED) as answer:
            alone.append(json.loads(await answer.read()))
    texts = [choice["message"]["content"] for choice in together["choices"]]
    assert texts == [body["choices"][0]["message"]["content"] for body in alone]
    assert len(set(texts)) > 1
    assert together["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert together["usage"]["completion_tokens"] == sum(body["usage"]["completion_tokens"] for body in alone)
    await every_block_is_free(client)


async def test_best_of_is_the_likeliest_of_its_samples(client: Client) -> None:
    request = {"model": MODEL, "prompt": "Once upon a time", "seed": 7, "logprobs": 0, **SAMPLED}
    async with client.post("/v1/completions", {**request, "n": 4}) as answer:
        samples = json.loads(await answer.read())["choices"]
    async with client.post("/v1/completions", {**request, "best_of": 4}) as answer:
        body = json.loads(await answer.read())
    totals = [sum(sample["logprobs"]["token_logprobs"]) for sample in samples]
    (best,) = body["choices"]
    assert best["text"] == samples[totals.index(max(totals))]["text"]
    assert body["usage"]["completion_tokens"] == 48
    await every_block_is_free(client)


async def test_greedy_logprobs_are_the_likeliest_and_spell_the_answer(client: Client) -> None:
    async with client.chat(PARIS, temperature=0, max_tokens=20, logprobs=True, top_logprobs=3) as answer:
        (choice,) = json.loads(await answer.read())["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    for entry in content:
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == sorted(
            (top["logprob"] for top in entry["top_logprobs"]), reverse=True
        )
        assert entry["logprob"] <= 0.0
    await every_block_is_free(client)


async def test_an_echo_tells_how_likely_the_prompt_was(client: Client) -> None:
    request = {"model": MODEL, "prompt": "The capital of France is Paris", "echo": True, "max_tokens": 1, "logprobs": 1}
    for _ in range(2):
        async with client.post("/v1/completions", {**request, "temperature": 0}) as answer:
            (choice,) = json.loads(await answer.read())["choices"]
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == choice["text"]
        assert told["token_logprobs"][0] is None
        by_token = dict(zip(told["tokens"], told["token_logprobs"], strict=True))
        assert by_token[" Paris"] > -2.0 > by_token[" capital"]
    await every_block_is_free(client)


async def test_biased_and_bad_words_do_not_come(client: Client) -> None:
    async with client.chat(PARIS, temperature=0, max_tokens=12) as answer:
        text = json.loads(await answer.read())["choices"][0]["message"]["content"]
    assert text.startswith("The capital of France is Paris")
    (the,) = smollm2_tokenizer().encode("The")
    async with client.chat(PARIS, temperature=0, max_tokens=12, logit_bias={str(the): -100}) as answer:
        assert not json.loads(await answer.read())["choices"][0]["message"]["content"].startswith("The")
    async with client.chat(PARIS, temperature=0, max_tokens=12, bad_words=["Paris"]) as answer:
        assert "Paris" not in json.loads(await answer.read())["choices"][0]["message"]["content"]
    await every_block_is_free(client)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_a_schema_holds_whatever_is_drawn(client: Client, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    async with client.chat(
        "Tell me of a person.", temperature=temperature, n=3, seed=5, max_tokens=120, response_format=form
    ) as answer:
        body = json.loads(await answer.read())
    for choice in body["choices"]:
        assert choice["finish_reason"] == "stop"
        person = json.loads(choice["message"]["content"])
        assert set(person) == {"name", "age"}
        assert len(person["name"]) <= 12
        assert 0 <= person["age"] <= 99
    await every_block_is_free(client)


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}, r"\d{4}-\d{2}-\d{2}"),
        ({"choice": ["blue", "green"]}, "blue|green"),
        ({"grammar": 'root ::= "<" [a-c]+ ">"'}, "<[abc]+>"),
    ],
)
async def test_other_forms_hold_too(client: Client, structured: dict[str, Any], pattern: str) -> None:
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "min_tokens": 30, "structured_outputs": structured}
    async with client.chat("Say something.", **fields) as answer:
        (choice,) = json.loads(await answer.read())["choices"]
    assert choice["finish_reason"] == "length" or re.fullmatch(pattern, choice["message"]["content"])
    if "grammar" not in structured:
        assert choice["finish_reason"] == "stop", "an end that is all that is left comes, min_tokens or not"
    await every_block_is_free(client)


async def test_a_finished_answer_is_not_paid_for_up_to_min_tokens(client: Client) -> None:
    fields = {"temperature": 0, "max_tokens": 12, "min_tokens": 9, "structured_outputs": {"choice": ["yes"]}}
    async with client.chat("Is water wet?", **fields) as answer:
        body = json.loads(await answer.read())
    assert body["choices"][0]["message"]["content"] == "yes"
    assert body["usage"]["completion_tokens"] == 2


async def test_a_client_that_forbids_what_it_requires_gets_no_500(client: Client) -> None:
    async def refused(choice: str, word: str, **fields: Any) -> tuple[int, Any]:
        structured = {"structured_outputs": {"choice": [choice]}, "bad_words": [word], "max_tokens": 9}
        async with client.chat(**structured, **fields) as answer:
            text = (await answer.read()).decode()
            return answer.status, sse(text)[-1]["error"] if answer.status == 200 else json.loads(text)["error"]

    for stream in (False, True):
        status, error = await refused("a", "a", stream=stream)
        assert (status, error["code"], error["param"]) == (400, "constraint_unsatisfiable", "bad_words")
        status, error = await refused("a dog", "dog", stream=stream)
        assert (error["code"], error["type"]) == ("constraint_unsatisfiable", "invalid_request_error")
        assert status in (200, 400) if stream else status == 400
    await every_block_is_free(client)


async def test_a_required_tool_is_called_with_arguments_that_fit(process: Process) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "description": "Weather now", "parameters": parameters}}
    async with openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key=TOKEN) as sdk:
        answer = await sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "How is the weather in Rome?"}],
            tools=[tool],  # type: ignore[list-item]
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=60,
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
