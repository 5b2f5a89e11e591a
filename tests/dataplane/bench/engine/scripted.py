"""A scripted server: a process that answers completions as its flags say, without computing anything.

Run as `python -m tests.dataplane.bench.engine.scripted --port N …`. Its failures are those of real servers: one that
stops early, counts wrongly, dies in the middle, or computes while it was asked for nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import msgspec
from aiohttp import web

TOKEN = {"choices": [{"index": 0, "text": "a"}], "usage": None}
ROOT = Path(__file__).parents[4]


def command(port: int, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.dataplane.bench.engine.scripted", "--port", str(port), *flags)


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gap", type=float, default=0.002, help="seconds before each token")
    parser.add_argument("--at-once", action="store_true", help="show all tokens as one piece")
    parser.add_argument("--short", type=int, default=0, help="tokens it stops early by")
    parser.add_argument("--misread", type=int, default=0, help="prompt tokens it counts too many")
    parser.add_argument("--cached", type=int, default=0, help="prompt tokens it claims to have had")
    parser.add_argument("--die-after", type=int, default=-1, help="requests after which it dies within one")
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--error-event", action="store_true")
    parser.add_argument("--busy", action="store_true", help="compute all the time")
    parser.add_argument("--diary", type=Path, help="file that gets a line for each request: name and body")
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    if options.busy:
        threading.Thread(target=_spin, daemon=True).start()
    app = web.Application()
    served = 0

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal served
        served += 1
        raw = await request.read()
        if options.diary:
            with options.diary.open("ab") as diary:
                diary.write(options.name.encode() + b" " + raw + b"\n")
        body = msgspec.json.decode(raw)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"] - options.short
        for index in range(count):
            if served > options.die_after >= 0 and index == min(1, count - 1):
                os._exit(7)
            if not options.at_once:
                await asyncio.sleep(options.gap)
                await _send(response, TOKEN)
        if options.at_once:
            await _send(response, TOKEN)
        if options.error_event:
            await _send(response, {"error": {"message": "out of blocks"}})
        prompt = body["prompt"]
        usage = {
            "prompt_tokens": (len(prompt) if isinstance(prompt, list) else len(prompt.split())) + options.misread,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": options.cached},
        }
        if not options.no_usage:
            await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    app.add_routes([web.get("/health", health), web.post("/v1/completions", complete)])
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, shutdown_timeout=0.1)


async def _send(response: web.StreamResponse, event: dict[str, object]) -> None:
    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


def _spin() -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass


if __name__ == "__main__":
    main()
