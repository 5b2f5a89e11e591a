"""A replica with the real SmolLM2 as the product starts it: front and core processes over real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from dataplane.protocol import HEADER_ATTEMPT, UsageRecord
from dataplane.usage import UsageJournal
from tests.dataplane.replica.harness import (
    MODEL,
    TOKEN,
    Client,
    Process,
    client_of,
    replica_process,
    sse,
    until_ready,
)
from tests.dataplane.replica.real import CONTEXT, PARIS, every_block_is_free


async def test_the_openai_client_works_unchanged(process: Process, client: Client) -> None:
    async with openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key=TOKEN, max_retries=0) as api:
        models = [model async for model in api.models.list()]
        assert [model.id for model in models] == [MODEL]
        assert models[0].created > 0
        assert (await api.models.retrieve(MODEL)).id == MODEL
        answer = await api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": PARIS}], temperature=0, max_tokens=20
        )
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        stream = await api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": PARIS}],
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens == answer.usage.prompt_tokens
        assert usage.prompt_tokens_details is not None
        # The same prompt came before: all its full blocks but the tail are found again.
        assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16 > 0
        completion = await api.completions.create(model=MODEL, prompt="Once upon a", max_tokens=3, temperature=0)
        assert completion.choices[0].text
        assert completion.choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError):
            await api.with_options(api_key="wrong").chat.completions.create(model=MODEL, messages=[])
    await every_block_is_free(client)


async def test_32_streams_at_once_all_finish_and_every_block_is_free(client: Client) -> None:
    async def ask(number: int) -> tuple[str, int]:
        fields = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 8}
        async with client.chat(f"Count from {number}.", ignore_eos=True, **fields) as stream:
            *chunks, usage, done = sse((await stream.read()).decode())
            assert done == "[DONE]"
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            return text, usage["usage"]["completion_tokens"]

    answers = await asyncio.gather(*(ask(number % 16) for number in range(32)))
    assert [tokens for _, tokens in answers] == [8] * 32
    assert [text for text, _ in answers[:16]] == [text for text, _ in answers[16:]], (
        "greedy answers do not depend on company"
    )
    await every_block_is_free(client)


async def test_f12_a_stream_that_is_left_frees_its_blocks(client: Client) -> None:
    stream = await client.chat("Tell a long story.", stream=True, max_tokens=400, ignore_eos=True)
    await stream.content.readany()
    async with asyncio.timeout(30):  # the core tells its state a few times a second
        while await client.metric("tidegate_engine_requests_running") != 1:
            await asyncio.sleep(0.05)
    stream.close()
    await every_block_is_free(client)
    aborted = await client.metric('tidegate_engine_requests_finished_total{reason="abort"}')
    assert aborted >= 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PARIS}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Ünïcödé 漢字 🦀"}], "stream": True}),
        ("/v1/completions", {"prompt": ["Once upon a", "time there was a crab"]}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
    ],
)
async def test_prompts_are_counted_as_they_are_read(client: Client, path: str, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "max_tokens": 1, **fields}
    async with client.post(f"{path}/tokens", body) as answer:
        assert answer.status == 200
        counted = await answer.json()
    async with client.post(path, {**body, "stream": False}) as answer:
        whole = await answer.json()
    assert counted == {"prompt_tokens": whole["usage"]["prompt_tokens"], "prompts": len(whole["choices"])}


async def test_counting_needs_the_token_and_a_body_that_could_be_served(client: Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": PARIS}]}
    async with client.post("/v1/chat/completions/tokens", body, authorization="Bearer wrong") as answer:
        assert answer.status == 401
    async with client.get("/v1/chat/completions/tokens") as answer:
        assert answer.status == 405
    async with client.post("/v1/chat/completions/tokens", {"model": MODEL}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "messages"
    async with client.post(
        "/v1/chat/completions/tokens", {**body, "messages": [{"role": "user", "content": "word " * 5000}]}
    ) as answer:
        assert (await answer.json())["error"]["code"] == "context_length_exceeded"


BAD: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "unknown"}, 404, "model_not_found", "model"),
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, 400, "context_length_exceeded", "messages"),
    ({"max_tokens": -1}, 400, "invalid_value", "max_tokens"),
    ({"max_tokens": 10_000}, 400, "context_length_exceeded", "max_tokens"),
    ({"max_completion_tokens": 10_000}, 400, "context_length_exceeded", "max_completion_tokens"),
    ({"temperature": 9}, 400, "invalid_value", "temperature"),
    ({"n": 0}, 400, "invalid_value", "n"),
    ({"seed": 2**70}, 400, "invalid_value", "seed"),
    ({"top_k": -5}, 400, "invalid_value", "top_k"),
    ({"repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty"),
    ({"stop_token_ids": [10**9]}, 400, "invalid_value", "stop_token_ids"),
    ({"reasoning_effort": "high"}, 400, "unsupported_parameter", "reasoning_effort"),
    ({"n": 129}, 400, "invalid_value", "n"),
    ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
    ({"logit_bias": {"49152": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias"),
    ({"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 3}}}, 400, "invalid_grammar",
     "structured_outputs"),
    ({"structured_outputs": {"regex": "(a?){3000}a{3000}"}}, 400, "invalid_grammar", "structured_outputs"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, 400,
     "invalid_grammar", "response_format"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "status", "code", "param"), BAD, ids=lambda value: str(value)[:30])
async def test_bad_input_is_refused_in_openais_shape_and_the_engine_goes_on(
    client: Client, fields: dict[str, Any], status: int, code: str, param: str | None, stream: bool
) -> None:
    request = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": stream, **fields}
    async with client.post("/v1/chat/completions", request) as answer:
        assert answer.status == status
        assert answer.content_type == "application/json"
        error = json.loads(await answer.read())["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]


async def test_a_body_of_10_mb_is_refused_and_the_engine_goes_on(client: Client) -> None:
    body = b'{"model": "' + b"x" * 10_000_000 + b'"}'
    async with client.post("/v1/chat/completions", body) as answer:
        assert answer.status == 413
        assert json.loads(await answer.read())["error"]["code"] == "request_too_large"

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 50_000

    headers = {"authorization": f"Bearer {TOKEN}"}
    async with client.session.post(f"{client.url}/v1/completions", data=endless(), headers=headers) as answer:
        assert answer.status == 413
    async with client.chat("Hi", max_tokens=1) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("POST", "/v1/chat/completions", "wrong", 401),
        ("POST", "/v1/chat/completions", None, 401),
        ("GET", "/v1/models", "wrong", 401),
        ("GET", "/v1/models/gpt-9", TOKEN, 404),
        ("GET", "/v1/chat/completions", TOKEN, 405),
        ("DELETE", "/v1/models", TOKEN, 405),
        ("GET", "/nowhere", TOKEN, 404),
        ("GET", "/metrics", None, 401),
        ("GET", "/healthz", None, 200),
    ],
)
async def test_strangers_and_wrong_addresses(
    client: Client, method: str, path: str, token: str | None, status: int
) -> None:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with client.session.request(method, f"{client.url}{path}", headers=headers) as answer:
        assert answer.status == status
        assert answer.headers["x-tidegate-replica"] == "replica-0"
        if status != 200:
            assert json.loads(await answer.read())["error"]["message"]


async def test_kill_9_of_the_core_mid_stream_and_back_to_ready(process: Process, client: Client) -> None:
    async with client.chat("Tell a long story.", stream=True, max_tokens=400, ignore_eos=True) as stream:
        seen = await stream.content.readany()
        (core,) = process.core_pids()
        os.kill(core, signal.SIGKILL)
        async with asyncio.timeout(2):
            seen += await stream.content.read()
    events = sse(seen.decode())
    assert events[-1]["error"]["code"] == "engine_unavailable"
    async with client.chat() as refused:
        assert refused.status == 503
        assert "retry-after" in refused.headers
    await until_ready(client)
    assert await client.metric("tidegate_engine_core_restarts_total") == 1
    async with client.chat(PARIS, temperature=0, max_tokens=20) as answer:
        assert answer.status == 200
        assert "Paris" in await answer.text()
    await every_block_is_free(client)


async def test_a_core_that_hangs_ends_its_stream_and_is_replaced(tmp_path: Path) -> None:
    flags = ("--max-model-len", str(CONTEXT), "--num-blocks", "257", "--core-stall-seconds", "6")
    with replica_process(tmp_path, *flags) as process:
        async with client_of(process.url) as client:
            await until_ready(client)
            async with client.chat("Tell a long story.", stream=True, max_tokens=400, ignore_eos=True) as stream:
                seen = await stream.content.readany()
                (core,) = process.core_pids()
                os.kill(core, signal.SIGSTOP)
                async with asyncio.timeout(60):
                    while (health := await _health(client))["state"] == "ready":
                        await asyncio.sleep(0.05)
                assert health["state"] == "draining"
                assert health["reason"] == "the engine core has said nothing for 3 s"
                async with client.chat() as refused:
                    assert refused.status == 503
                    assert json.loads(await refused.read())["error"]["code"] == "engine_unavailable"
                assert not stream.content.at_eof(), "what runs is given the other half"
                seen += await stream.content.read()
            error = sse(seen.decode())[-1]["error"]
            assert (error["code"], error["message"]) == (
                "engine_unavailable",
                "the engine core hung: no answer for 6 s",
            )
            await until_ready(client)
            assert await client.metric("tidegate_engine_core_restarts_total") == 1
            assert core not in process.core_pids()
            async with client.chat(PARIS, temperature=0, max_tokens=20) as answer:
                assert "Paris" in await answer.text()
    assert "hung: no answer for 6 s; starting it again" in process.log.read_text()


async def _health(client: Client) -> Any:
    async with client.get("/healthz") as answer:
        return json.loads(await answer.read())


async def test_sigterm_ends_streams_stops_the_core_and_keeps_usage(process: Process, client: Client) -> None:
    """Last in this module: it stops the replica."""
    headers = {HEADER_ATTEMPT: "the-last-attempt"}
    async with client.chat("Tell a story.", stream=True, max_tokens=400, ignore_eos=True, headers=headers) as stream:
        seen = await stream.content.readany()
        (core,) = process.core_pids()
        process.popen.send_signal(signal.SIGTERM)
        seen += await stream.content.read()
    assert sse(seen.decode())[-1]["error"]["code"] == "aborted"
    assert await asyncio.to_thread(process.popen.wait, 60) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(core, 0)
    records: dict[str, UsageRecord] = {
        record.attempt_id: record for record in UsageJournal(process.home / "replicas" / "replica-0").batch(10_000)
    }
    assert records["the-last-attempt"].finish == "abort"
    assert records["the-last-attempt"].output_tokens > 0
    assert "Traceback" not in process.log.read_text()
