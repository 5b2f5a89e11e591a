"""The pipe on a real Valkey, and on servers that misbehave."""

from __future__ import annotations

import asyncio
import random
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, OutOfMemoryError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from controlplane.local.valkey import EmbeddedValkey
from controlplane.redis_pipe import ScriptPipe
from controlplane.settings import Secret
from tests.services import free_port, service_folder

ECHO = "return {KEYS[1], ARGV[1]}"
COUNT = "return redis.call('INCRBY', KEYS[1], ARGV[1])"


@pytest.fixture
async def pipe(valkey: str, redis: Redis) -> AsyncIterator[ScriptPipe]:
    """On the run's server, which knows no script yet."""
    await redis.script_flush()
    pipe = ScriptPipe(Secret(valkey))
    yield pipe
    await pipe.close()


@pytest.fixture
def own_server() -> Iterator[EmbeddedValkey]:
    with service_folder("pipe") as folder:
        server = EmbeddedValkey(folder / "data", free_port())
        server.start()
        try:
            yield server
        finally:
            server.stop()


@asynccontextmanager
async def speaking(said: bytes, *, close: bool = False) -> AsyncIterator[str]:
    """A server that greets as Redis does and then says `said` to the first script; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"tidegate\r\n")
            writer.write(b"+OK\r\n")
            await reader.readuntil(b"EVALSHA")
            for byte in said:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)
            if not close:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def of_pipes(redis: Redis) -> int:
    """Connections whose last command was a script."""
    return sum(str(client["cmd"]).startswith("eval") for client in await redis.client_list())


async def test_each_of_many_callers_gets_its_own_answer_on_one_connection(pipe: ScriptPipe, redis: Redis) -> None:
    script = pipe.script(ECHO)
    await script(keys=["first"], args=[b""])
    before = await of_pipes(redis)
    values = [b"%d\r\n\x00\xff" % n * (1 + n % 50) for n in range(3000)]
    answers = await asyncio.gather(*(script(keys=[f"k{n}"], args=[value]) for n, value in enumerate(values)))
    assert answers == [[b"k%d" % n, value] for n, value in enumerate(values)]
    assert 1 <= await of_pipes(redis) <= before


async def test_a_server_that_lost_its_scripts_is_told_them_again(pipe: ScriptPipe, redis: Redis) -> None:
    script = pipe.script(COUNT)
    assert await script(keys=["n"], args=[b"2"]) == 2
    await redis.script_flush()
    assert sorted(await asyncio.gather(*(script(keys=["n"], args=[b"1"]) for _ in range(3)))) == [3, 4, 5]


async def test_a_script_that_fails_says_so_and_harms_no_other(pipe: ScriptPipe) -> None:
    broken, good = pipe.script("return redis.call('NONSENSE')"), pipe.script(ECHO)
    asked = (good(keys=["a"], args=[b"1"]), broken(keys=["a"], args=[]), good(keys=["b"], args=[b"2"]))
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(outcomes[1], ResponseError)
    assert [outcomes[0], outcomes[2]] == [[b"a", b"1"], [b"b", b"2"]]


async def test_f12_callers_that_leave_shift_nobody_elses_answer(pipe: ScriptPipe, rng: random.Random) -> None:
    script = pipe.script(ECHO)

    async def ask(n: int) -> bool:
        return bool(await script(keys=["k"], args=[b"%d" % n]) == [b"k", b"%d" % n])

    for _ in range(40):
        tasks = [asyncio.create_task(ask(n)) for n in range(25)]
        for task in rng.sample(tasks, 10):
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is True or isinstance(outcome, asyncio.CancelledError)


async def test_a_wrong_password_is_an_answer_and_the_next_call_asks_again(own_server: EmbeddedValkey) -> None:
    pipe = ScriptPipe(Secret(f"redis://:wrong@127.0.0.1:{own_server.port}/0"))
    for _ in range(2):
        with pytest.raises(AuthenticationError):
            await pipe.script(ECHO)(keys=["k"], args=[b""])
    await pipe.close()


async def test_f14_a_server_that_is_killed_fails_the_calls_under_way_and_is_found_again(
    own_server: EmbeddedValkey,
) -> None:
    pipe = ScriptPipe(Secret(own_server.url))
    script = pipe.script(ECHO)
    await script(keys=["k"], args=[b""])
    assert own_server.child is not None
    own_server.child.send(signal.SIGSTOP)
    asked = [asyncio.create_task(script(keys=["k"], args=[b"x"])) for _ in range(5)]
    await asyncio.sleep(0.05)
    own_server.child.stop(signal.SIGKILL, 10)
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, RedisConnectionError) for one in outcomes), outcomes
    with pytest.raises(RedisConnectionError):
        await script(keys=["k"], args=[b""])
    own_server.stop()
    own_server.start()
    assert await script(keys=["k"], args=[b"back"]) == [b"k", b"back"]
    await pipe.close()


async def test_f14_a_server_that_falls_silent_is_given_up_and_found_again(
    own_server: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.redis_pipe.SILENCE_S", 0.2)
    pipe = ScriptPipe(Secret(own_server.url))
    script = pipe.script(ECHO)
    await script(keys=["k"], args=[b""])
    assert own_server.child is not None
    own_server.child.send(signal.SIGSTOP)
    try:
        with pytest.raises(RedisTimeoutError):
            await script(keys=["k"], args=[b""])
    finally:
        own_server.child.send(signal.SIGCONT)
    assert await script(keys=["k"], args=[b"back"]) == [b"k", b"back"]
    await pipe.close()


async def test_answers_that_come_byte_by_byte_are_whole() -> None:
    async with speaking(b"*2\r\n$1\r\nk\r\n$2\r\n\r\n\r\n") as url:
        pipe = ScriptPipe(Secret(url))
        assert await pipe.script(ECHO)(keys=["k"], args=[b""]) == [b"k", b"\r\n"]
        await pipe.close()


@pytest.mark.parametrize("said", [b"what?\r\n", b"$5\r\nhal", b""])
async def test_a_server_that_speaks_otherwise_or_hangs_up_is_away(said: bytes) -> None:
    async with speaking(said, close=True) as url:
        pipe = ScriptPipe(Secret(url))
        with pytest.raises(RedisConnectionError):
            await pipe.script(ECHO)(keys=["k"], args=[b""])
        await pipe.close()


async def test_an_error_keeps_its_kind() -> None:
    async with speaking(b"-OOM command not allowed\r\n") as url:
        pipe = ScriptPipe(Secret(url))
        with pytest.raises(OutOfMemoryError):
            await pipe.script(ECHO)(keys=["k"], args=[b""])
        await pipe.close()


async def test_rediss_speaks_tls_and_checks_the_certificate(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"tidegate\r\n")
        writer.write(b"+OK\r\n")
        await reader.readuntil(b"EVALSHA")
        writer.write(b":7\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    url = f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    trusting, strict = ScriptPipe(Secret(f"{url}?ssl_ca_certs={certificate}")), ScriptPipe(Secret(url))
    assert await trusting.script(ECHO)(keys=["k"], args=[b""]) == 7
    with pytest.raises(RedisConnectionError):
        await strict.script(ECHO)(keys=["k"], args=[b""])
    for pipe in (trusting, strict):
        await pipe.close()
    server.close()


async def test_close_ends_what_waits(own_server: EmbeddedValkey) -> None:
    pipe = ScriptPipe(Secret(own_server.url))
    script = pipe.script(ECHO)
    await script(keys=["k"], args=[b""])
    assert own_server.child is not None
    own_server.child.send(signal.SIGSTOP)
    asked = asyncio.create_task(script(keys=["k"], args=[b""]))
    await asyncio.sleep(0.02)
    await pipe.close()
    with pytest.raises(RedisConnectionError):
        await asked
    own_server.child.send(signal.SIGCONT)
