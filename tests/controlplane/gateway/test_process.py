"""`tidegate serve gateway` as users run it: the unchanged OpenAI client, and an orderly end."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import aiohttp
import openai

from controlplane.settings import Settings
from dataplane.protocol import HEADER_KEY, HEADER_PROJECT, HEADER_TENANT
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.deployment import Accounts
from tests.controlplane.gateway.harness import STREAM
from tests.controlplane.gateway.replicas import DONE, fake_replica
from tests.controlplane.test_serve import serving

MESSAGES = [{"role": "user", "content": "hi"}]


def log_lines(settings: Settings) -> list[dict[str, object]]:
    path = settings.home / "gateway" / settings.gateway_id / "requests.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_the_openai_client_works_and_sigterm_ends_a_stream_with_an_error_event(settings: Settings) -> None:
    accounts = Accounts(settings)
    await accounts.tenant("acme")
    await accounts.pool("pool-m", "m")
    key = await accounts.key("acme")
    async with fake_replica() as replica:
        await accounts.replica("r0", "pool-m", replica.url)
        with serving("gateway", settings) as (process, port):
            url = f"http://127.0.0.1:{port}/v1"
            async with openai.AsyncOpenAI(api_key=key, base_url=url, max_retries=0) as client:
                whole = await client.chat.completions.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]
                assert whole.choices[0].message.content == "Héllo 🦀"
                stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
                text = "".join([part.choices[0].delta.content or "" async for part in stream])
                assert text == "Héllo 🦀"
            seen = replica.seen[-1].headers
            assert (seen[HEADER_TENANT], seen[HEADER_KEY]) == ("acme", key.split("_")[1])
            assert seen[HEADER_PROJECT] == "default"
            replica.behave = replicas.stream_forever
            body, headers = json.dumps(STREAM), {"authorization": f"Bearer {key}"}
            async with (
                aiohttp.ClientSession() as session,
                session.post(url + "/chat/completions", data=body, headers=headers) as response,
            ):
                await response.content.readany()
                process.send_signal(signal.SIGTERM)
                rest = await response.read()
                assert not rest.endswith(DONE)
                last = json.loads(rest.rstrip().rsplit(b"data: ", 1)[1])
                assert last["error"]["code"] == "gateway_shutdown"
            assert await asyncio.to_thread(process.wait, 20) == 0
        assert replica.gone == 1
    await accounts.close()
    assert [line["outcome"] for line in log_lines(settings)] == ["finished", "finished", "failed"]
    said = Path(settings.home / "gateway.log").read_text()
    assert key not in said
    assert "Traceback" not in said
