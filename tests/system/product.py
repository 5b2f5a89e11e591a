"""The whole product as one `tidegate up`, and ways to call it, look into it and hurt it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from controlplane.local.child import wrap
from controlplane.local.client import Answer, Client
from tests.controlplane.local.processes import is_alive, wait_until

START_S = 180.0
STOP_S = 60.0


class Product:
    """One home folder and the supervisor that runs it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.output = home.with_name(f"{home.name}.out")
        self._process: subprocess.Popen[bytes] | None = None

    # -- life ----------------------------------------------------------------------------------------------

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Start on free ports and wait until it says where it listens."""
        given = {key: value for key, value in os.environ.items() if key not in {"DATABASE_URL", "REDIS_URL"}}
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                wrap(  # a killed test run must not leave the product behind
                    [sys.executable, "-m", "controlplane", "up", "--home", self.home, "--free-ports", *arguments],
                    death_signal=signal.SIGTERM,
                ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**given, **(environment or {})},
                start_new_session=True,
            )
        process = self._process
        ready = self.home / "run" / "endpoints.json"
        if not wait_until(lambda: self._published(ready) or process.poll() is not None, START_S):
            process.kill()
        if not self._published(ready):
            raise AssertionError(f"the product did not start:\n{self.output.read_text()}")

    def _published(self, path: Path) -> bool:
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return False
        return self._process is not None and found["pid"] == self._process.pid

    def stop(self) -> int:
        """Ask for an orderly end; the exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(STOP_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None

    def kill(self) -> None:
        """kill -9 of the supervisor, and nothing else."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    @property
    def supervisor(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def tree(self) -> list[psutil.Process]:
        """Every process below the supervisor, and the supervisor."""
        return [self.supervisor, *self.supervisor.children(recursive=True)]

    def process(self, *words: str) -> psutil.Process:
        """The topmost process below the supervisor whose command line has all `words`."""
        for candidate in self.supervisor.children(recursive=True):
            try:
                line = " ".join(candidate.cmdline())
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if all(word in line for word in words) and is_alive(candidate.pid):
                return candidate
        raise AssertionError(f"no process with {words}")

    # -- what it left for us -------------------------------------------------------------------------------

    def _read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / name).read_text())
        return found

    @property
    def control_url(self) -> str:
        return str(self._read("run/endpoints.json")["control_url"])

    @property
    def gateway_url(self) -> str:
        return str(self._read("run/endpoints.json")["gateway_url"])

    @property
    def model(self) -> str:
        return "smollm2-135m-instruct"

    @property
    def demo_key(self) -> str:
        return str(self._read("demo.json")["key"])

    @property
    def credentials(self) -> dict[str, Any]:
        return self._read("admin.json")

    def request_log(self) -> list[dict[str, Any]]:
        """The gateway's own whole lines, rotated files included."""
        lines: list[dict[str, Any]] = []
        for path in sorted(self.home.glob("gateway/*/requests.jsonl*")):
            lines += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return lines

    # -- calls ---------------------------------------------------------------------------------------------

    def admin(self, method: str, path: str, json: Any = None, *, expect: int = 200) -> Any:
        """The admin API's answer to the operator."""
        answer = Client(self.control_url, self.credentials["api_token"]).call(method, f"/api/v1{path}", json=json)
        assert answer.status == expect, answer.body
        return answer.json

    def as_tenant(self, method: str, path: str, json: Any = None, *, key: str | None = None) -> Answer:
        return Client(self.gateway_url, self.demo_key if key is None else key).call(method, path, json=json)

    def tenant_with_key(self, slug: str, **key: Any) -> tuple[str, str]:
        """A new tenant; its key's text and id."""
        self.admin("POST", "/tenants", {"slug": slug, "name": slug.title()}, expect=201)
        return self.key_of(slug, **key)

    def key_of(self, slug: str, **key: Any) -> tuple[str, str]:
        created = self.admin("POST", f"/tenants/{slug}/keys", {"name": "system test", **key}, expect=201)
        return created["key"], created["view"]["key_id"]

    def replica(self) -> dict[str, Any]:
        """The only replica, as the control plane shows it."""
        answer = self.admin("GET", "/replicas")
        rows = answer["items"] if isinstance(answer, dict) else answer
        assert len(rows) == 1
        only: dict[str, Any] = rows[0]
        return only


@dataclass(slots=True)
class Timed:
    """One request as its client saw it. Times are seconds since it was sent."""

    request_id: str = ""
    status: int = 0
    headers_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    total_s: float = 0.0
    text: str = ""
    chunks: int = 0
    done: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None


@asynccontextmanager
async def session(product: Product, key: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        product.gateway_url,
        headers={"Authorization": f"Bearer {key}"},
        timeout=aiohttp.ClientTimeout(total=240.0),
        connector=aiohttp.TCPConnector(limit=0),
    ) as opened:
        yield opened


async def chat(
    client: aiohttp.ClientSession,
    product: Product,
    prompt: str,
    *,
    stream: bool = True,
    started: asyncio.Event | None = None,
    **options: Any,
) -> Timed:
    """One chat request, read to its end and timed. `started` is set when the first text came."""
    body: dict[str, Any] = {"model": product.model, "messages": [{"role": "user", "content": prompt}], **options}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    got = Timed()
    begin = time.perf_counter()
    async with client.post("/v1/chat/completions", json=body) as response:
        got.status, got.request_id = response.status, response.headers["x-request-id"]
        got.headers_s = time.perf_counter() - begin
        if not stream or response.status != 200:
            answer = await response.json()
            got.error, got.usage = answer.get("error"), answer.get("usage") or {}
            if "choices" in answer:
                got.text = answer["choices"][0]["message"]["content"]
        else:
            async for line in response.content:
                _take(got, line.strip(), time.perf_counter() - begin)
                if got.first_s is not None and started is not None:
                    started.set()
    got.total_s = time.perf_counter() - begin
    return got


def _take(got: Timed, line: bytes, at: float) -> None:
    if not line.startswith(b"data:"):
        return
    data = line[5:].strip()
    if data == b"[DONE]":
        got.done = True
        return
    event = json.loads(data)
    got.error = event.get("error") or got.error
    got.usage = event.get("usage") or got.usage
    for choice in event.get("choices", ()):
        if choice["delta"].get("content"):
            got.first_s = at if got.first_s is None else got.first_s
            got.last_s = at
            got.chunks += 1
            got.text += choice["delta"]["content"]
