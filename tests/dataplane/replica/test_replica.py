"""A replica over HTTP when things go wrong: a dead core, a leaving client, a drain, a stop.

The core follows a script here, so that what it does wrong is exact; `test_server` has the real engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dataplane.generation import GenerationEndpoint
from dataplane.intake import INLINE_CHARACTERS
from dataplane.protocol import (
    HEADER_ARRIVED,
    HEADER_ATTEMPT,
    HEADER_FAIR_TAG,
    HEADER_KEY,
    HEADER_PROJECT,
    HEADER_REPLICA,
    HEADER_REQUEST,
    HEADER_TENANT,
    HEADER_USAGE,
    ReplicaState,
    UsageBasis,
)
from dataplane.replica import Replica
from dataplane.server import ReplicaServer
from dataplane.tokenizer import Tokenizer
from tests.dataplane.replica.harness import AUTH, MODEL, make_config, scripted, serving, smollm2_tokenizer, sse, until


def kill_core(replica: Replica) -> None:
    pid = replica.core.process_id
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def first_text(stream: Any, letters: int = 1) -> bytes:
    """Read until the first text of a stream has come, `letters` tokens of it."""
    seen = b""
    while sum(map(len, re.findall(rb'"content":"(A+)', seen))) < letters:
        seen += await stream.content.readany()
    return seen


async def test_kill_9_mid_stream_gives_an_error_event_and_a_closed_stream_and_then_it_serves_again(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, scripted(emit=2, finish=False))
    async with serving(config) as (replica, client):
        async with client.chat(stream=True, headers={HEADER_ATTEMPT: "attempt-1"}) as stream:
            assert stream.status == 200
            seen = await first_text(stream, letters=2)
            kill_core(replica)
            killed = time.monotonic()
            seen += await stream.content.read()
            ended = time.monotonic()
        events = sse(seen.decode())
        assert events[-1]["error"]["code"] == "engine_unavailable"
        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        assert "SIGKILL" in events[-1]["error"]["message"]
        assert "[DONE]" not in events
        # The bound is the product's promise; a poll would need as long as its interval, an event does not.
        assert ended - killed < 2.0
        (record,) = replica.journal.batch(10)
        assert (record.attempt_id, record.finish, record.basis) == ("attempt-1", "error", UsageBasis.COUNTED)
        assert record.output_tokens == 2
        await until(lambda: replica.state is ReplicaState.READY, "the core is back")
        assert replica.core.restarts == 1
        async with client.chat(stream=True) as stream:
            await first_text(stream)
            assert stream.status == 200


async def test_a_core_that_dies_before_the_first_token_is_a_503_not_a_broken_stream(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(emit=0, finish=False))
    async with serving(config) as (replica, client):
        for stream in (True, False):
            await until(lambda: replica.state is ReplicaState.READY, "the core is ready")
            asking = asyncio.create_task(_status_and_body(client.chat(stream=stream)))
            await until(lambda: replica.core.in_flight == 1, "the request runs")
            kill_core(replica)
            status, headers, body = await asking
            assert status == 503
            assert int(headers["retry-after"]) >= 1
            assert body["error"]["code"] == "engine_unavailable"


async def _status_and_body(asking: Any) -> tuple[int, Any, Any]:
    async with asking as answer:
        return answer.status, answer.headers, json.loads(await answer.read())


async def test_while_the_core_starts_requests_are_503_with_retry_after_and_health_says_why(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(loading_s=30))
    async with serving(config, ready=False) as (_, client):
        status, headers, body = await _status_and_body(client.chat())
        assert (status, body["error"]["code"], body["error"]["type"]) == (503, "engine_unavailable", "server_error")
        assert int(headers["retry-after"]) >= 1
        status, _, health = await _status_and_body(client.get("/healthz", accept="*/*"))
        assert (status, health["state"]) == (503, "starting")
        assert health["reason"]


async def test_f12_a_client_that_leaves_frees_its_request_in_the_engine(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(emit=1, finish=False))
    async with serving(config) as (replica, client):
        stream = await client.chat(stream=True, headers={HEADER_ATTEMPT: "leaving"})
        await first_text(stream)
        assert replica.core.in_flight == 1
        stream.close()
        await until(lambda: replica.core.in_flight == 0, "the stream's request is freed")
        waiting = asyncio.create_task(_status_and_body(client.chat(stream=False)))
        await until(lambda: replica.core.in_flight == 1, "a whole answer is awaited")
        waiting.cancel()
        await until(lambda: replica.core.in_flight == 0, "and freed too")
        records = replica.journal.batch(10)
        assert [record.finish for record in records] == ["abort", "abort"]
        assert {record.basis for record in records} == {UsageBasis.ENGINE}
        assert records[0].output_tokens == 1


async def test_300_streams_at_once_are_all_served(tmp_path: Path) -> None:
    """The server's own limit on connections must not be lower than the replica's on sequences."""
    config = make_config(tmp_path, scripted(emit=1, finish=False))
    async with serving(config) as (replica, client):
        streams = await asyncio.gather(*(client.chat(stream=True) for _ in range(300)))
        assert replica.core.in_flight == 300
        async with client.get("/healthz") as answer:
            assert answer.status == 200
        for stream in streams:
            stream.close()
        await until(lambda: replica.core.in_flight == 0, "every request is freed")


async def test_a_long_prompt_is_tokenised_while_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer.encode
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(self: Tokenizer, text: str, **options: Any) -> list[int]:
        if len(text) > INLINE_CHARACTERS:
            begun.set()
            assert may_go_on.wait(60)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    async with serving(make_config(tmp_path, scripted(emit=1))) as (_, client):
        long = asyncio.create_task(_status_and_body(client.chat("lorem ipsum " * INLINE_CHARACTERS)))
        await until(begun.is_set, "the long prompt is being tokenised")
        status, _, _ = await _status_and_body(client.chat("Hello"))
        assert status == 200
        assert not long.done()
        may_go_on.set()
        status, _, body = await long
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_f37_streams_opened_and_left_by_the_hundred_leave_nothing_behind(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(emit=1, finish=False))
    async with serving(config) as (replica, client):
        before = len(asyncio.all_tasks())

        async def open_and_leave() -> None:
            stream = await client.chat(stream=True)
            await first_text(stream)
            stream.close()

        for _ in range(10):
            await asyncio.gather(*(open_and_leave() for _ in range(20)))
        await until(lambda: replica.core.in_flight == 0, "every request is freed")
        await until(lambda: len(asyncio.all_tasks()) <= before + 2, "no task is left")
        assert len(replica.journal) == 200


async def test_a_client_that_takes_nothing_delays_nobody_and_is_given_up(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(emit=3, finish=False), client_timeout_s=0.5)
    body = json.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
    requests = [{"type": "http.request", "body": body}]
    blocked = asyncio.Event()

    async def receive() -> Any:
        return requests.pop() if requests else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            blocked.set()
            await asyncio.Event().wait()

    scope: Any = {"type": "http", "method": "POST", "headers": [(b"authorization", AUTH["authorization"].encode())]}
    async with serving(config) as (replica, client):
        deaf = asyncio.create_task(GenerationEndpoint.chat(replica)(scope, receive, send))
        await blocked.wait()
        async with client.chat(stream=True) as other:
            await first_text(other)
        async with asyncio.timeout(30):
            await deaf
        await until(lambda: replica.core.in_flight == 0, "the deaf client's request is freed")


async def test_draining_refuses_new_requests_and_finishes_running_ones(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(emit=1, finish=False))
    async with serving(config) as (replica, client), client.chat(stream=True) as stream:
        await first_text(stream)
        replica.drain("asked by a test")
        assert replica.state is ReplicaState.DRAINING
        status, headers, body = await _status_and_body(client.chat())
        assert (status, body["error"]["code"]) == (503, "draining")
        assert "retry-after" in headers
        assert replica.core.in_flight == 1, "the running request goes on"
        replica.resume()
        assert replica.state is ReplicaState.READY
        stopping = asyncio.create_task(replica.stop(30.0, hurry=(hurry := asyncio.Event())))
        await until(lambda: replica.state is ReplicaState.DRAINING, "it stops")
        replica.resume()
        assert replica.state is ReplicaState.DRAINING, "who is told to stop does not come back"
        hurry.set()
        await stopping


async def test_a_silent_core_keeps_its_gauges_and_is_no_drain(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(emit=1, finish=False, stall_s=8.0))
    async with serving(config) as (replica, client), client.chat(stream=True) as stream:
        await first_text(stream)
        pid = replica.core.process_id
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: replica.state is ReplicaState.DRAINING, "the silence is noticed")
        status, headers, body = await _status_and_body(client.chat())
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        assert "has said nothing for 4 s" in body["error"]["message"]
        assert "retry-after" in headers
        assert replica.gauges.running == 1
        replica.drain("asked by a test")
        assert replica.reason == "asked by a test"
        os.kill(pid, signal.SIGCONT)
        await until(lambda: replica.core.state is ReplicaState.READY, "the core speaks again")
        assert replica.state is ReplicaState.DRAINING, "who was asked to drain still does"


async def test_stopping_ends_streams_with_an_error_event_and_keeps_their_usage(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(emit=1, finish=False), drain_s=0.1)
    async with serving(config) as (replica, client):
        async with client.chat(stream=True) as stream:
            seen = await first_text(stream)
            stopping = asyncio.create_task(replica.stop(0.1))
            seen += await stream.content.read()
            await stopping
        assert sse(seen.decode())[-1]["error"]["code"] == "aborted"
    again = Replica(make_config(tmp_path, scripted()), smollm2_tokenizer())
    assert [record.finish for record in again.journal.batch(10)] == ["abort"]
    assert again.boot_epoch > replica.boot_epoch


async def test_one_record_per_attempt_with_the_gateways_identity(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(emit=3))
    headers = {
        HEADER_ATTEMPT: "attempt-9",
        HEADER_REQUEST: "request-9",
        HEADER_TENANT: "demo",
        HEADER_PROJECT: "apollo",
        HEADER_KEY: "key-9",
        HEADER_ARRIVED: "1700000000.25",
    }
    async with serving(config) as (replica, client):
        async with client.chat(headers=headers) as answer:
            body = json.loads(await answer.read())
            assert answer.headers[HEADER_REPLICA] == "replica-7"
            assert answer.headers[HEADER_REQUEST] == "request-9"
        await until(lambda: len(replica.journal) == 1, "the record is kept")
        (record,) = replica.journal.batch(10)
        assert (record.attempt_id, record.request_id) == ("attempt-9", "request-9")
        assert (record.tenant, record.project, record.key_id) == ("demo", "apollo", "key-9")
        assert record.started_at == 1700000000.25 < record.finished_at
        assert (record.pool, record.replica, record.model) == ("pool", "replica-7", MODEL)
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (record.prompt_tokens, record.output_tokens)
        assert usage["prompt_tokens_details"] == {"cached_tokens": record.cached_tokens}
        async with client.chat(messages=[]) as refused:
            assert refused.status == 400
        assert len(replica.journal) == 1, "what never reached the engine cost nothing"


@pytest.mark.parametrize(
    ("name", "value"),
    [(HEADER_ATTEMPT, "x" * 200), (HEADER_FAIR_TAG, "inf"), (HEADER_FAIR_TAG, "a"), (HEADER_ARRIVED, "nan")],
)
async def test_headers_are_bounded(tmp_path: Path, name: str, value: str) -> None:
    async with serving(make_config(tmp_path, scripted())) as (_, client):
        status, _, body = await _status_and_body(client.chat(headers={name: value}))
        assert (status, body["error"]["param"]) == (400, name)


async def test_usage_chunks_follow_who_asked_for_them(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, scripted(emit=3))) as (_, client):

        async def events(*, asked: bool, hidden: bool) -> list[Any]:
            options = {"stream_options": {"include_usage": True}} if asked else {}
            headers = {HEADER_USAGE: "hidden"} if hidden else {}
            async with client.chat(stream=True, headers=headers, **options) as stream:
                return sse((await stream.read()).decode())

        for asked, hidden in ((True, False), (True, True), (False, False)):
            *chunks, done = await events(asked=asked, hidden=hidden)
            assert done == "[DONE]"
            if asked:
                last = chunks.pop()
                assert last["choices"] == []
                assert last["usage"]["completion_tokens"] == 3
                assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
            assert all(("usage" in chunk) is (asked and not hidden) for chunk in chunks)
            assert all(chunk.get("usage") is None for chunk in chunks)
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "AAA"
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"


async def test_f40_a_character_of_several_tokens_is_never_split(tmp_path: Path) -> None:
    text = "🦜 naïve 漢字 👩‍👩‍👧 data: x\n\nend"
    tokens = smollm2_tokenizer().encode(text)
    assert any(smollm2_tokenizer().decode([token]) == "\ufffd" for token in tokens), "no token is part of a character"
    async with serving(make_config(tmp_path, scripted(emit=tokens))) as (_, client):
        async with client.chat(stream=True) as stream:
            *chunks, done = sse((await stream.read()).decode("utf-8", errors="strict"))
        assert done == "[DONE]"
        pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        async with client.chat() as answer:
            assert json.loads(await answer.read())["choices"][0]["message"]["content"] == text


async def test_f25_a_first_token_without_text_is_told_as_an_empty_piece(tmp_path: Path) -> None:
    """So the gateway's first-any time is the token's, and its first-visible time the text's."""
    first = smollm2_tokenizer().encode("🦜")[0]
    async with serving(make_config(tmp_path, scripted(emit=[first], finish=False))) as (_, client):
        for path, request in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions", {"prompt": "x"}),
        ):
            async with client.post(path, {"model": MODEL, "stream": True, **request}) as stream:
                seen = b""
                while not seen.endswith(b"\n\n"):
                    seen += await stream.content.readany()
            choice = sse(seen.decode())[-1]["choices"][0]
            assert (choice.get("text") == "") or (choice.get("delta") == {"content": ""})
            assert choice["finish_reason"] is None


async def test_f28_counters_only_grow_across_a_core_restart(tmp_path: Path) -> None:
    names = (
        "tidegate_engine_steps_total",
        "tidegate_engine_output_tokens_total",
        "tidegate_engine_requests_received_total",
        'tidegate_engine_requests_finished_total{reason="length"}',
        "tidegate_engine_time_to_first_token_seconds_count",
    )
    async with serving(make_config(tmp_path, scripted(emit=5))) as (replica, client):
        async with client.chat() as answer:
            assert answer.status == 200
        before = [await client.metric(name) for name in names]
        assert before == [5, 5, 1, 1, 1]
        kill_core(replica)
        await until(lambda: replica.core.restarts == 1 and replica.state is ReplicaState.READY, "the core is back")
        assert [await client.metric(name) for name in names] == before
        async with client.chat() as answer:
            assert answer.status == 200
        assert [await client.metric(name) for name in names] == [10, 10, 2, 2, 2]
        assert await client.metric("tidegate_engine_core_restarts_total") == 1


@pytest.mark.parametrize(
    ("settings", "token", "status"),
    [
        ({}, "internal-token-of-the-tests", 200),
        ({}, "wrong", 401),
        ({"metrics_token": "scrape"}, "scrape", 200),
        ({"metrics_token": "scrape"}, "internal-token-of-the-tests", 401),
        ({"metrics_open": True}, "", 200),
    ],
)
async def test_f32_metrics_need_their_token(tmp_path: Path, settings: dict[str, Any], token: str, status: int) -> None:
    async with (
        serving(make_config(tmp_path, scripted(), **settings)) as (_, client),
        client.get("/metrics", authorization=f"Bearer {token}") as answer,
    ):
        assert answer.status == status
        if status == 200:
            assert 'tidegate_engine_state{state="ready"} 1.0' in await answer.text()


async def test_a_core_that_can_never_work_ends_the_replica_with_its_reason(tmp_path: Path) -> None:
    replica = Replica(make_config(tmp_path, scripted(mode="config")), smollm2_tokenizer())
    async with asyncio.timeout(60):
        assert await ReplicaServer(replica).run(signals=()) is False
    assert replica.core.reason == "there is no model at /nowhere"


async def test_too_many_sequences_are_refused_not_queued(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(emit=1, finish=False), max_sequences=2)
    async with serving(config) as (replica, client):
        streams = [await client.chat(stream=True) for _ in range(2)]
        assert replica.core.in_flight == 2
        status, headers, body = await _status_and_body(client.chat())
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        await until(lambda: replica.core.in_flight == 0, "the places are free again")


def test_boot_epochs_grow_even_when_the_clock_was_set_back(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted())
    times = iter([2000.0, 1000.0, 500.0])
    epochs = []
    for _ in range(3):
        now = next(times)
        epochs.append(Replica(config, smollm2_tokenizer(), wall=lambda now=now: now).boot_epoch)
    assert epochs == [2_000_000, 2_000_001, 2_000_002]


def test_f33_tokens_do_not_print(tmp_path: Path) -> None:
    config = make_config(tmp_path, scripted(), internal_token="canary-1", metrics_token="canary-2")
    assert "canary" not in repr(config)
