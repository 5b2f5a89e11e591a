"""Replicas for tests: in this process over a scripted core, or a process of its own over the real model."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from dataplane.config import find_model
from dataplane.core_client import CoreSpec, RestartPolicy
from dataplane.ports import free_port
from dataplane.protocol import ReplicaState
from dataplane.replica import Replica
from dataplane.replica_config import ReplicaConfig
from dataplane.server import ReplicaServer
from dataplane.tokenizer import Tokenizer, load_tokenizer

TOKEN = "internal-token-of-the-tests"
MODEL = "smollm2-135m-instruct"
AUTH = {"authorization": f"Bearer {TOKEN}"}
SCRIPTED = (sys.executable, "-m", "tests.dataplane.replica.scripted_core")
QUICK = RestartPolicy(first_s=0.05, longest_s=0.2)
PATIENCE_S = 60.0


@cache
def smollm2_tokenizer() -> Tokenizer:
    return load_tokenizer(find_model("smollm2")[0])


def scripted(*, stall_s: float = 60.0, **options: Any) -> CoreSpec:
    return CoreSpec(model="script", options=options, command=SCRIPTED, stall_s=stall_s)


def make_config(home: Path, core: CoreSpec, **overrides: Any) -> ReplicaConfig:
    port = free_port("127.0.0.1", 0)
    values: dict[str, Any] = {
        "replica": "replica-7",
        "pool": "pool",
        "served_model": MODEL,
        "model_path": Path("unused"),
        "host": "127.0.0.1",
        "port": port,
        "advertise_url": f"http://127.0.0.1:{port}",
        "home": home,
        "core": core,
        "internal_token": TOKEN,
        "restart": QUICK,
        "drain_s": 0.2,
    }
    return ReplicaConfig(**{**values, **overrides})


async def until(condition: Any, what: str) -> None:
    """Wait for a condition of this process; fails with `what` when it never holds."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


@dataclass
class Client:
    """Talks HTTP to one replica."""

    session: aiohttp.ClientSession
    url: str

    def post(self, path: str, body: Any, **headers: str) -> Any:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.session.post(f"{self.url}{path}", data=io.BytesIO(data), headers={**AUTH, **headers})

    def chat(self, content: str = "Hello", *, headers: Mapping[str, str] | None = None, **fields: Any) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return self.post("/v1/chat/completions", body, **dict(headers or {}))

    def get(self, path: str, **headers: str) -> Any:
        return self.session.get(f"{self.url}{path}", headers=headers or AUTH)

    async def metric(self, name: str) -> float:
        """The value of one sample line, labels included; 0 when it is not there."""
        async with self.get("/metrics") as answer:
            assert answer.status == 200
            for line in (await answer.text()).splitlines():
                if line.startswith(f"{name} "):
                    return float(line.rsplit(" ", 1)[1])
        return 0.0


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
        yield Client(session, url)


@asynccontextmanager
async def serving(config: ReplicaConfig, *, ready: bool = True) -> AsyncIterator[tuple[Replica, Client]]:
    """A replica on this event loop; taken down in order at the end."""
    replica = Replica(config, smollm2_tokenizer())
    server = ReplicaServer(replica)
    running = asyncio.create_task(server.run(signals=()))
    try:
        if ready:
            await until(lambda: replica.state is ReplicaState.READY, "the replica is ready")
        async with client_of(config.advertise_url) as client:
            await listening(client)
            yield replica, client
    finally:
        server.stop()
        await running


async def listening(client: Client) -> None:
    """Wait until it answers, ready or not."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with client.get("/healthz"):
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.02)


def sse(raw: str) -> list[Any]:
    """The decoded events of a stream; "[DONE]" stays text."""
    datas = [part.removeprefix("data: ") for part in raw.split("\n\n") if part]
    return [data if data == "[DONE]" else msgspec.json.decode(data) for data in datas]


@dataclass
class Process:
    """A replica as the product starts it."""

    popen: subprocess.Popen[bytes]
    url: str
    home: Path
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def core_pids(self) -> list[int]:
        """Process ids of this replica's engine cores."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                    command = (entry / "cmdline").read_bytes()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(parent) == self.pid and b"dataplane.core_process" in command:
                    found.append(int(entry.name))
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait(PATIENCE_S)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "controlplane", *arguments]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "TIDEGATE_INTERNAL_TOKEN": TOKEN, **variables}


@contextmanager
def replica_process(home: Path, *flags: str) -> Iterator[Process]:
    """A replica with the real SmolLM2, started by the command line; ended by its own pid."""
    port = free_port("127.0.0.1", 0)
    home.mkdir(parents=True, exist_ok=True)
    log = home / "replica.log"
    arguments = command("engine", "serve", "--home", str(home), "--port", str(port), "--threads", "1", *flags)
    with log.open("wb") as sink:
        popen = subprocess.Popen(arguments, env=environment(), stdout=sink, stderr=sink)
    process = Process(popen, f"http://127.0.0.1:{port}", home, log)
    try:
        yield process
    finally:
        if popen.poll() is None:
            popen.terminate()
            try:
                popen.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()


async def until_ready(client: Client, *, patience_s: float = 180.0) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            async with client.get("/healthz") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError("the replica never became ready")
