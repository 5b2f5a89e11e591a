"""kill -9 of each process: what a client and an operator see, and that it comes back."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.controlplane.local.processes import carrying, is_alive, wait_until
from tests.system.product import Product, chat, session

CORE = ("core_process",)


def answers(product: Product) -> bool:
    try:
        body = {"model": product.model, "prompt": "One two", "max_tokens": 1}
        return product.as_tenant("POST", "/v1/completions", body).status == 200
    except OSError:
        return False


async def test_a_killed_engine_core_ends_its_streams_with_an_error_and_comes_back(product: Product) -> None:
    before = product.replica()
    core = product.process(*CORE)
    async with session(product, product.demo_key) as client:
        started = asyncio.Event()
        stream = asyncio.create_task(
            chat(client, product, "Tell a very long story about the sea.", max_tokens=2000, started=started)
        )
        await started.wait()
        core.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        got = await asyncio.wait_for(stream, 30.0)
        took = time.monotonic() - begin
    assert took <= 2.0
    assert got.error is not None, "the stream ended without an error event"
    assert got.error["message"]
    assert set(got.error) == {"message", "type", "param", "code"}
    assert not got.done, "a broken stream must not say [DONE]"

    def shown() -> bool:
        after = product.replica()
        restarted = after["core_restarts"] == before["core_restarts"] + 1
        return restarted and after["state"] == "ready" and after["core_epoch"] != before["core_epoch"]

    assert await asyncio.to_thread(wait_until, shown, 60.0), product.replica()
    assert await asyncio.to_thread(wait_until, lambda: answers(product), 30.0)
    gauges = product.replica()["gauges"]
    assert gauges.get("blocks_used", 0) == 0


@pytest.mark.parametrize(
    "words",
    [("serve", "gateway"), ("serve", "control"), ("controlplane", "worker"), ("engine", "serve"), ("valkey-server",)],
    ids=["gateway", "control plane", "worker", "replica", "Valkey"],
)
def test_a_killed_process_is_started_again_and_requests_are_answered(product: Product, words: tuple[str, ...]) -> None:
    killed = product.process(*words)
    killed.kill()
    assert wait_until(lambda: not is_alive(killed.pid))

    def back() -> bool:
        try:
            return product.process(*words).pid != killed.pid
        except AssertionError:
            return False

    assert wait_until(back, 60.0)
    assert wait_until(lambda: answers(product), 90.0), product.output.read_text()
    assert wait_until(lambda: _control_answers(product), 60.0)
    assert wait_until(lambda: product.replica()["state"] == "ready", 60.0)


def test_a_killed_postgres_is_started_again_with_every_row(product: Product) -> None:
    product.admin("POST", "/tenants", {"slug": "before-the-kill", "name": "Kept"}, expect=201)
    killed = product.process("bin/postgres", "-D")
    killed.kill()
    assert wait_until(lambda: not is_alive(killed.pid))
    assert answers(product), "a known key goes on while Postgres is away"
    assert wait_until(lambda: _control_answers(product), 60.0)
    assert product.admin("GET", "/tenants/before-the-kill")["name"] == "Kept"


def _control_answers(product: Product) -> bool:
    from controlplane.local.client import Client

    try:
        client = Client(product.control_url, product.credentials["api_token"])
        return client.call("GET", "/api/v1/tenants").status == 200
    except OSError:
        return False


def test_a_killed_supervisor_leaves_no_process_and_the_next_start_keeps_every_row(home: Path) -> None:
    product = Product(home)
    product.start()
    key, _ = product.tenant_with_key("survivor")
    demo = product.demo_key
    assert product.as_tenant("GET", "/v1/models", key=key).status == 200
    pids = [process.pid for process in product.tree()]
    assert len(pids) > 8
    product.kill()
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids), 20.0), _told(pids)
    assert not carrying(str(home)), carrying(str(home))

    product.start()
    try:
        assert product.demo_key == demo
        assert product.admin("GET", "/tenants/survivor")["slug"] == "survivor"
        for each in (key, demo):
            assert product.as_tenant("GET", "/v1/models", key=each).status == 200
        assert answers(product)
        assert product.stop() == 0
        assert not carrying(str(home))
    finally:
        product.stop()


def _told(pids: list[int]) -> list[str]:
    return [" ".join(psutil.Process(pid).cmdline()) for pid in pids if is_alive(pid)]
