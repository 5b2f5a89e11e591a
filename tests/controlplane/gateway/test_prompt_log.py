"""Prompts on their way to the log: of those who asked, redacted before they leave, and never in a request's way."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from prometheus_client.exposition import generate_latest
from redis.asyncio import Redis

from controlplane.gateway import prompt_log as module
from controlplane.gateway.prompt_log import PromptLog
from controlplane.gateway.prompt_text import LARGEST_BODY, answer_of, prompt_of
from controlplane.promptlog.schemas import MAX_TEXT, Delivery, LoggedEntry
from controlplane.quotas.schemas import QuotaKind
from controlplane.settings import Settings
from controlplane.tenants.schemas import PromptLogging
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.deployment import until
from tests.controlplane.gateway.harness import CHAT, STREAM, Running, route, running_gateway
from tests.controlplane.gateway.metered import limit
from tests.controlplane.gateway.replicas import DONE, FakeReplica, chunk, event, parts
from tests.services import free_port

PROMPT = "canary-prompt-3f9a my mail is ada@example.com"
ANSWER = "canary-answer-71bd"
ASKED = {**CHAT, "messages": [{"role": "user", "content": PROMPT}]}
TENANT = "00000000-0000-4000-8000-000000000001"


class Receiver:
    """The control plane's side; `status` is what it answers."""

    def __init__(self) -> None:
        self.port = free_port()
        self.status = 200
        self.entries: list[LoggedEntry] = []
        self.raw = b""
        self.calls = 0

    async def take(self, request: web.Request) -> web.Response:
        self.calls += 1
        body = await request.read()
        assert request.headers["authorization"].startswith("Bearer internal-token")
        if self.status == 200:
            self.raw += body
            self.entries += msgspec.msgpack.decode(body, type=Delivery).entries
        return web.Response(status=self.status)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post(module.PATH, made.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", made.port).start()
    yield made
    await runner.cleanup()


@asynccontextmanager
async def logging_gateway(
    settings: Settings, receiver: Receiver, *routes: Any, **options: Any
) -> AsyncIterator[Running]:
    ours = msgspec.structs.replace(settings, control_url=f"http://127.0.0.1:{receiver.port}")
    async with running_gateway(ours, *routes, **options) as served:
        metrics = served.gateway.metrics
        served.gateway.prompt_log = PromptLog(
            ours, on_delivered=metrics.prompts_logged.inc, on_dropped=metrics.prompts_dropped.inc
        )
        work = asyncio.create_task(served.gateway.prompt_log.run())
        yield served
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def a_key(served: Running, **wish: Any) -> str:
    return served.policy.key(tenant_id=TENANT, prompt_log=PromptLogging(**wish))


async def test_a_tenant_that_asked_finds_prompt_and_answer_redacted(
    offline_settings: Settings, receiver: Receiver, replica: FakeReplica
) -> None:
    pieces = [event(chunk("", role="assistant")), *(event(chunk(part)) for part in ("canary-", "answer", "-71bd to b"))]
    pieces += [event(chunk("ob@exam")), event(chunk("ple.org.")), event(chunk(finish="stop")), DONE]
    async with logging_gateway(offline_settings, receiver, route(replica, "r0")) as served:
        key = a_key(served)
        for body in ({**ASKED, "stream": True}, ASKED):
            if body.get("stream"):
                replica.behave = parts(pieces)
            else:
                replica.behave = replicas.answer
            async with served.post(body, key=key) as response:
                await response.read()
                assert response.status == 200
        await until(lambda: len(receiver.entries) == 2)
        streamed, whole = sorted(receiver.entries, key=lambda entry: entry.at)
        assert streamed.prompt == "user: canary-prompt-3f9a my mail is [email]"
        assert streamed.answer == f"{ANSWER} to [email]."
        assert (streamed.redactions, streamed.cut, streamed.outcome, streamed.reason) == (2, False, "finished", "stop")
        assert str(streamed.tenant_id) == TENANT
        assert whole.answer == "Héllo 🦀"
        assert b"ada@" not in receiver.raw, "it is redacted before it leaves"
        assert served.metric("prompts_logged_total") == 2


async def test_f33_without_asking_no_prompt_and_no_answer_is_in_any_sink(
    settings: Settings, receiver: Receiver, redis: Redis, replica: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    replica.behave = parts([event(chunk(ANSWER)), event(chunk(finish="stop")), DONE])
    some = limit(QuotaKind.REQUESTS_PER_MINUTE, 100)
    async with logging_gateway(settings, receiver, route(replica, "r0"), limits=(some,)) as served:
        for body in (ASKED, {**ASKED, "stream": True}, {**ASKED, "model": "nope"}, {**ASKED, "max_tokens": -1}):
            async with served.post(body) as response:
                await response.read()
        await served.settled(4)
        assert receiver.calls == 0
        sinks = [generate_latest(served.registry).decode(), caplog.text, str(served.counters())]
        sinks += [path.read_text(errors="replace") for path in Path(settings.home).rglob("*") if path.is_file()]
        async for key in redis.scan_iter():
            sinks.append(f"{key!r} {await redis.dump(key)!r}")
        assert len(sinks) > 4
        assert not [sink for sink in sinks if "canary-" in sink]


async def test_with_the_log_on_prompts_are_on_no_disk_and_not_in_redis(
    settings: Settings, receiver: Receiver, redis: Redis, replica: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    async with logging_gateway(settings, receiver, route(replica, "r0")) as served:
        async with served.post(ASKED, key=a_key(served)) as response:
            await response.read()
        await until(lambda: len(receiver.entries) == 1)
        await served.settled(1)
        held = [path.read_bytes() for path in Path(settings.home).rglob("*") if path.is_file()]
        held += [await redis.dump(key) or b"" async for key in redis.scan_iter()]
        assert not [content for content in held if b"canary-" in content]
        assert "canary-" not in caplog.text


async def test_no_request_waits_for_its_log_and_what_is_lost_is_counted(
    offline_settings: Settings, receiver: Receiver, replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    receiver.status = 503
    async with logging_gateway(offline_settings, receiver, route(replica, "r0")) as served:
        key = a_key(served)
        for _ in range(12):
            async with served.post(ASKED, key=key) as response:
                await response.read()
                assert response.status == 200
            await asyncio.sleep(0)
        await until(lambda: receiver.calls > 0)
        assert served.metric("prompts_dropped_total") >= 12 - 3 - 3
        receiver.status = 200
        await until(lambda: served.metric("prompts_logged_total") + served.metric("prompts_dropped_total") == 12)
        assert len(receiver.entries) == served.metric("prompts_logged_total") > 0


async def test_a_delivery_that_is_refused_for_good_does_not_block_the_next(
    offline_settings: Settings, receiver: Receiver, replica: FakeReplica
) -> None:
    receiver.status = 400
    async with logging_gateway(offline_settings, receiver, route(replica, "r0")) as served:
        key = a_key(served)
        async with served.post(ASKED, key=key) as response:
            await response.read()
        await until(lambda: served.metric("prompts_dropped_total") == 1)
        receiver.status = 200
        async with served.post(ASKED, key=key) as response:
            await response.read()
        await until(lambda: len(receiver.entries) == 1)


async def test_only_a_sample_is_kept_and_only_so_many_a_second(offline_settings: Settings) -> None:
    now, dropped = [0.0], [0]

    def drop(number: int) -> None:
        dropped[0] += number

    log = PromptLog(offline_settings, on_dropped=drop, rng=random.Random(1), clock=lambda: now[0])
    half = grant_with(PromptLogging(sample=0.5))
    kept = 0
    for _ in range(300):
        now[0] += 1.0
        kept += log.begin(half) is not None
    assert 110 < kept < 190
    assert dropped[0] == 0
    every = grant_with(PromptLogging())
    assert sum(log.begin(every) is not None for _ in range(1_000)) == module.BURST
    assert dropped[0] == 1_000 - module.BURST
    assert log.begin(grant_with(None)) is None


def grant_with(wish: PromptLogging | None) -> Any:
    from tests.controlplane.gateway.test_telemetry import grant

    return msgspec.structs.replace(grant(), prompt_log=wish)


async def test_long_texts_are_cut_and_huge_bodies_are_not_read(
    offline_settings: Settings, receiver: Receiver, replica: FakeReplica
) -> None:
    async with logging_gateway(offline_settings, receiver, route(replica, "r0")) as served:
        key = a_key(served)
        for size in (MAX_TEXT * 2, LARGEST_BODY):
            body = {**CHAT, "messages": [{"role": "user", "content": "x" * size}]}
            async with served.post(body, key=key) as response:
                await response.read()
        await until(lambda: len(receiver.entries) == 2)
        long, huge = sorted(receiver.entries, key=lambda entry: entry.at)
        assert (len(long.prompt), long.cut) == (MAX_TEXT, True)
        assert (huge.prompt, huge.cut) == (f"(a request of {LARGEST_BODY + len(json.dumps(CHAT)) - 2} bytes)", True)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "hi"}, "hi"),
        ({"prompt": ["a", "b", [1, 2]]}, "a\nb\n(tokens)"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
         "user: a\n(image_url)"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, 5]},
         "assistant: f{}"),
        ({"messages": "nonsense", "prompt": 5}, ""),
        ([], "(not readable)"),
    ],
)  # fmt: skip
def test_prompts_are_read_as_people_would(body: object, text: str) -> None:
    assert prompt_of(json.dumps(body).encode())[0] == text


def test_escapes_hide_nothing_and_no_text_breaks_the_database() -> None:
    prompt, _ = prompt_of(b'{"prompt": "ada\\u0040example.com\\u0000"}')
    assert prompt == "ada@example.com\N{REPLACEMENT CHARACTER}"


def test_answers_of_several_choices_are_told_apart_and_errors_have_none() -> None:
    stream = event({**chunk("a"), "choices": [{"index": 1, "delta": {"content": "b"}}]}) + event(chunk("a")) + DONE
    assert answer_of(stream, whole=True) == ("[0] a\n[1] b", False)
    assert answer_of(b'{"error": {"message": "no"}}', whole=True) == ("", False)
    assert answer_of(b'{"choices": [{"text": "x"', whole=False) == ("", True)
    assert answer_of(json.dumps(replicas.COMPLETION).encode(), whole=True) == ("Héllo 🦀", False)
    assert STREAM["stream"] is True
