"""Several choices, log-probabilities, echoes, tools and structured output, over a core that follows a script."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dataplane.config import find_model
from dataplane.core_client import CoreSpec
from tests.dataplane.replica.harness import (
    MODEL,
    Client,
    make_config,
    scripted,
    serving,
    smollm2_tokenizer,
    sse,
    until,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ids(text: str) -> list[int]:
    return smollm2_tokenizer().encode(text, add_special_tokens=False)


async def whole(client: Client, path: str = "/v1/chat/completions", **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, **fields}
    if path == "/v1/chat/completions":
        body.setdefault("messages", [{"role": "user", "content": "Hello"}])
    async with client.post(path, body) as answer:
        return answer.status, json.loads(await answer.read())


async def streamed(client: Client, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
    body = {"model": MODEL, "stream": True, **fields}
    if path == "/v1/chat/completions":
        body.setdefault("messages", [{"role": "user", "content": "Hello"}])
    async with client.post(path, body) as answer:
        assert answer.status == 200
        events = sse((await answer.read()).decode())
    assert events[-1] == "[DONE]"
    return events[:-1]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def logprobs(pieces: list[dict[str, Any]], part: str = "content") -> list[Any]:
    """Those of all pieces of a stream."""
    return joined(piece["logprobs"][part] for piece in pieces if piece["logprobs"])


def of(chunks: list[Any], index: int) -> list[dict[str, Any]]:
    return [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index]


# Choices ---------------------------------------------------------------------------------------------------------


async def test_n_choices_count_their_prompt_once(tmp_path: Path) -> None:
    core = scripted(emits={"0": [*ids("one"), 2], "1": [*ids("two words"), 2], "2": [*ids("three"), 2]}, finish="stop")
    async with serving(make_config(tmp_path, core)) as (replica, client):
        _, alone = await whole(client)
        status, body = await whole(client, n=3)
        assert status == 200
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert texts == ["one", "two words", "three"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        assert body["usage"]["completion_tokens"] == sum(len(ids(text)) + 1 for text in texts)

        chunks = await streamed(client, n=3, stream_options={"include_usage": True})
        for index, text in enumerate(texts):
            own = of(chunks, index)
            assert own[0]["delta"]["role"] == "assistant"
            assert "".join(choice["delta"].get("content", "") for choice in own) == text
            assert [choice["finish_reason"] for choice in own][-1] == "stop"
        assert chunks[-1]["usage"] == body["usage"]

        status, body = await whole(client, "/v1/completions", prompt=["a", "b"], n=2)
        assert [choice["text"] for choice in body["choices"]] == ["one", "two words"] * 2
        assert replica.core.in_flight == 0
        await until(lambda: len(replica.journal) == 4, "every attempt has one usage record")
        three = replica.journal.batch(10)[1]
        assert (three.prompt_tokens, three.output_tokens) == (
            alone["usage"]["prompt_tokens"],
            sum(len(ids(text)) + 1 for text in texts),
        )


async def test_a_choice_that_ends_early_leaves_the_others_alone(tmp_path: Path) -> None:
    core = scripted(emits={"0": ids("a STOP b c d"), "1": ids("quite another text")})
    async with serving(make_config(tmp_path, core)) as (_, client):
        _, body = await whole(client, n=2, stop=["STOP"])
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a ", "quite another text"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]


async def test_best_of_answers_with_the_likeliest_samples_and_pays_for_all(tmp_path: Path) -> None:
    """OpenAI's rule is log-probability per token; the script makes later tokens and further samples less likely."""
    long, short, middle = ids("one two three four five six"), ids("one"), ids("one two three")
    core = scripted(emits={"0": long, "1": short, "2": middle})
    async with serving(make_config(tmp_path, core)) as (_, client):
        status, body = await whole(client, "/v1/completions", prompt="x", n=2, best_of=3)
        assert status == 200
        means = {
            text: -(number + 1) * sum(range(1, len(tokens) + 1)) / 8 / len(tokens)
            for number, (text, tokens) in enumerate(
                [("one two three four five six", long), ("one", short), ("one two three", middle)]
            )
        }
        likeliest = sorted(means, key=means.__getitem__, reverse=True)[:2]
        assert likeliest == ["one", "one two three four five six"], "by their totals it would be the middle one"
        assert [choice["text"] for choice in body["choices"]] == likeliest
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert all(choice["logprobs"] is None for choice in body["choices"])
        assert body["usage"]["completion_tokens"] == len(long) + len(short) + len(middle)
        _, shown = await whole(client, "/v1/completions", prompt="x", best_of=3, logprobs=1)
        assert len(shown["choices"]) == 1
        assert shown["choices"][0]["logprobs"]["tokens"] == ["one"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"n": 5}, "n"),
        ("/v1/completions", {"prompt": "x", "n": 5}, "n"),
        ("/v1/completions", {"prompt": "x", "best_of": 5}, "best_of"),
        ("/v1/completions", {"prompt": ["x"] * 3, "n": 4}, "n"),
        ("/v1/completions", {"prompt": ["x"] * 11}, "prompt"),
    ],
)
async def test_more_samples_than_can_ever_run_are_refused_by_name(
    tmp_path: Path, path: str, fields: dict[str, Any], param: str
) -> None:
    async with serving(make_config(tmp_path, scripted(most=4), max_sequences=10)) as (replica, client):
        status, body = await whole(client, path, **fields)
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, "invalid_value")
        assert replica.core.in_flight == 0


async def test_a_client_that_leaves_frees_every_sample(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, scripted(finish=False))) as (replica, client):
        async with client.chat(n=4, stream=True) as stream:
            await stream.content.readany()
            assert replica.core.in_flight == 4
        await until(lambda: replica.core.in_flight == 0, "all four samples are freed")
        await until(lambda: len(replica.journal) == 1, "and cost one record")


# Log-probabilities -----------------------------------------------------------------------------------------------


async def test_chat_logprobs_are_openais_whole_and_streamed(tmp_path: Path) -> None:
    tokens = ids("Hi 🌍!")
    async with serving(make_config(tmp_path, scripted(emit=[*tokens, 2], finish="stop"))) as (_, client):
        _, body = await whole(client, logprobs=True, top_logprobs=2)
        (choice,) = body["choices"]
        content = choice["logprobs"]["content"]
        assert choice["logprobs"]["refusal"] is None
        assert bytes(joined(entry["bytes"] for entry in content)).decode() == choice["message"]["content"] == "Hi 🌍!"
        assert [entry["logprob"] for entry in content] == [-(k + 1) / 8 for k in range(len(tokens))]
        assert content[0]["token"] == "Hi"
        assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.125, -1.125]
        assert any(entry["token"].startswith("bytes:\\x") for entry in content), "part of a character is told as bytes"

        own = of(await streamed(client, logprobs=True, top_logprobs=2), 0)
        assert logprobs(own) == content
        for piece in own:
            if piece["delta"].get("content") and piece["logprobs"]:
                raw = joined(entry["bytes"] for entry in piece["logprobs"]["content"])
                assert bytes(raw).decode() == piece["delta"]["content"], "a piece has those of its own text"

        _, plain = await whole(client, logprobs=True)
        assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        _, without = await whole(client)
        assert without["choices"][0]["logprobs"] is None


async def test_tokens_behind_a_stop_string_are_not_told(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, scripted(emit=ids("one two three four")))) as (_, client):
        for stop, expected in (("three", ["one", " two", " three"]), (" three", ["one", " two"])):
            _, body = await whole(client, logprobs=True, stop=[stop])
            told = [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
            assert told == expected
            own = of(await streamed(client, logprobs=True, stop=[stop]), 0)
            streams = logprobs(own)
            assert [entry["token"] for entry in streams] == expected


async def test_completion_logprobs_and_echo(tmp_path: Path) -> None:
    prompt, text = "Once upon", " a time"
    async with serving(make_config(tmp_path, scripted(emit=ids(text)))) as (_, client):
        _, body = await whole(client, "/v1/completions", prompt=prompt, logprobs=2)
        (choice,) = body["choices"]
        assert choice["text"] == text
        told = choice["logprobs"]
        assert told["tokens"] == [" a", " time"]
        assert told["text_offset"] == [0, 2]
        assert told["token_logprobs"] == [-0.125, -0.25]
        assert told["top_logprobs"][0][" a"] == -0.125
        assert len(told["top_logprobs"][0]) == 2
        _, none = await whole(client, "/v1/completions", prompt=prompt, logprobs=0)
        assert none["choices"][0]["logprobs"]["top_logprobs"] is None

        for given in (prompt, ids(prompt)):
            _, body = await whole(client, "/v1/completions", prompt=given, logprobs=1, echo=True, n=2)
            for choice in body["choices"]:
                assert choice["text"] == prompt + text
                told = choice["logprobs"]
                assert told["tokens"] == ["Once", " upon", " a", " time"]
                assert told["text_offset"] == [0, 4, 9, 11]
                assert told["token_logprobs"][:2] == [None, -1.0]
                assert told["top_logprobs"][0] is None
                assert "prompt_logprobs" not in choice
            assert body["usage"]["completion_tokens"] == 4

        own = of(await streamed(client, "/v1/completions", prompt=prompt, logprobs=1, echo=True), 0)
        assert "".join(piece["text"] for piece in own) == prompt + text
        assert logprobs(own, "text_offset") == [0, 4, 9, 11]
        _, bare = await whole(client, "/v1/completions", prompt=[prompt, "Then"], echo=True)
        assert [choice["text"] for choice in bare["choices"]] == [prompt + text, "Then" + text]
        assert bare["choices"][0]["logprobs"] is None


async def test_prompt_logprobs_are_vllms(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, scripted(emit=1))) as (_, client):
        _, body = await whole(client, "/v1/completions", prompt="Once upon a", prompt_logprobs=2)
        first, second, third = body["choices"][0]["prompt_logprobs"]
        assert first is None
        (upon,) = ids(" upon")
        assert second[str(upon)] == {"logprob": -1.0, "rank": 1, "decoded_token": " upon"}
        assert second[str(upon + 1)]["rank"] == 2
        assert len(third) == 2
        assert body["choices"][0]["logprobs"] is None
        _, chat = await whole(client, prompt_logprobs=0, n=2)
        assert chat["prompt_logprobs"][0] is None
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


# Tools -----------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def test_a_call_in_the_text_is_answered_as_one_whole_and_streamed(tmp_path: Path) -> None:
    core = scripted(emit=[*ids(f"Let me see. {CALL}"), 2], finish="stop")
    async with serving(make_config(tmp_path, core)) as (_, client):
        _, body = await whole(client, tools=[WEATHER], logprobs=True)
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        assert call["id"].startswith("call_")
        assert len(choice["logprobs"]["content"]) == len(ids(f"Let me see. {CALL}"))

        own = of(await streamed(client, tools=[WEATHER], logprobs=True), 0)
        assert own[-1]["finish_reason"] == "tool_calls"
        assert "".join(piece["delta"].get("content") or "" for piece in own) == "Let me see."
        (delta,) = [piece["delta"]["tool_calls"] for piece in own if "tool_calls" in piece["delta"]]
        assert delta[0]["index"] == 0
        assert delta[0]["function"] == call["function"]
        told = logprobs(own)
        assert told == choice["logprobs"]["content"]

        _, unasked = await whole(client)
        assert unasked["choices"][0]["message"]["content"] == f"Let me see. {CALL}"
        assert unasked["choices"][0]["finish_reason"] == "stop"
        _, none = await whole(client, tools=[WEATHER], tool_choice="none")
        assert "tool_calls" not in none["choices"][0]["message"]


async def test_an_answer_without_a_call_stays_text(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, scripted(emit=[*ids("Sunny <b>"), 2], finish="stop"))) as (_, client):
        _, body = await whole(client, tools=[WEATHER])
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "Sunny <b>", "refusal": None}
        assert body["choices"][0]["finish_reason"] == "stop"
        own = of(await streamed(client, tools=[WEATHER]), 0)
        assert "".join(piece["delta"].get("content", "") for piece in own) == "Sunny <b>"
        assert own[-1]["finish_reason"] == "stop"


async def test_only_a_call_has_no_content(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, scripted(emit=[*ids(CALL), 2], finish="stop"))) as (_, client):
        _, body = await whole(client, tools=[WEATHER])
    assert body["choices"][0]["message"]["content"] is None
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


async def test_a_call_that_max_tokens_cuts_off_after_a_whole_one_is_left_out(tmp_path: Path) -> None:
    core = scripted(emit=ids(f'{CALL}\n<tool_call>\n{{"'))
    async with serving(make_config(tmp_path, core)) as (_, client):
        _, body = await whole(client, tools=[WEATHER])
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] is None
        assert len(choice["message"]["tool_calls"]) == 1
        own = of(await streamed(client, tools=[WEATHER]), 0)
    assert own[-1]["finish_reason"] == "length"
    opening, *pieces, _ = [piece["delta"] for piece in own]
    assert opening == {"role": "assistant", "content": ""}
    # The first token is told when it comes (F25), and then nothing until there is something to show.
    assert [piece for piece in pieces if "tool_calls" not in piece] in ([], [{"content": ""}])
    assert len([piece for piece in pieces if "tool_calls" in piece]) == 1


async def test_tools_take_room_in_the_prompt_and_results_go_back(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, scripted(emit=1))) as (_, client):
        _, without = await whole(client)
        _, told = await whole(client, tools=[WEATHER])
        assert told["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]
        calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
        messages = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c", "content": "22"},
        ]
        status, _ = await whole(client, tools=[WEATHER], messages=messages)
        assert status == 200


# Refusals by the core -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["context_length_exceeded", "constraint_unsatisfiable"])
async def test_what_the_core_refuses_is_the_clients_fault_and_no_500(tmp_path: Path, code: str) -> None:
    core = scripted(emit=0, refusal=["this cannot be", code, "max_tokens"])
    async with serving(make_config(tmp_path, core)) as (_, client):
        for stream in (False, True):
            status, body = await whole(client, stream=stream, max_completion_tokens=9, n=2)
            error = {
                "message": "this cannot be",
                "type": "invalid_request_error",
                "param": "max_completion_tokens",
                "code": code,
            }
            assert (status, body["error"]) == (400, error)


async def test_a_refusal_in_the_middle_of_a_stream_ends_it_with_the_same_error(tmp_path: Path) -> None:
    core = scripted(emit=2, refusal=["this cannot go on", "constraint_unsatisfiable", "structured_outputs"])
    fields = {"response_format": {"type": "json_object"}}
    async with serving(modelled(tmp_path, core)) as (_, client), client.chat(stream=True, **fields) as first:
        seen = await first.content.readany()
        async with client.chat(stream=True, **fields) as second:
            assert first.status == 200
            *_, last = sse((seen + await first.content.read()).decode())
            assert last["error"] == {
                "message": "this cannot go on",
                "type": "invalid_request_error",
                "param": "response_format",
                "code": "constraint_unsatisfiable",
            }
            second.close()


@pytest.mark.parametrize("code", ["engine_overloaded", "engine_unavailable"])
async def test_a_core_that_has_no_room_now_may_be_asked_again(tmp_path: Path, code: str) -> None:
    core = scripted(emit=0, refusal=["too many are waiting", code, None])
    async with serving(make_config(tmp_path, core)) as (_, client), client.chat() as answer:
        assert (answer.status, json.loads(await answer.read())["error"]["code"]) == (503, code)
        assert "retry-after" in answer.headers


# Structured output -----------------------------------------------------------------------------------------------


def modelled(home: Path, core: CoreSpec, **overrides: Any) -> Any:
    """A replica that knows its model's files, from which grammars are tried out."""
    return make_config(home, core, model_path=find_model("smollm2")[0], **overrides)


async def test_a_bad_grammar_is_a_400_under_the_name_it_came_by(tmp_path: Path) -> None:
    schema = {"type": "integer", "minimum": 5, "maximum": 3}
    slow = {"type": "integer", "multipleOf": 99991}
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            "response_format",
        ),
        ({"structured_outputs": {"json": slow}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a?){3000}a{3000}"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ]
    async with serving(modelled(tmp_path, scripted(emit=1))) as (replica, client):
        for fields, param in cases:
            for _ in range(2):
                status, body = await whole(client, **fields)
                assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_grammar", param)
                assert body["error"]["message"]
        for fields in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"tools": [WEATHER], "tool_choice": "required"},
        ):
            status, body = await whole(client, **fields)
            assert status == 200, body
        assert replica.core.in_flight == 0
