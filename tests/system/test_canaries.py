"""F33: secrets and prompts sent down every path of the running product are found in none of its sinks.

The secrets are the product's own: API key, admin token, password, session cookie, internal, session and metrics
tokens, Redis and Postgres passwords. Each is sent where it belongs and wherever it does not, with a prompt that is a
canary too. Then every file, log, table, Redis key, command line, metric and error body is searched.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import redis
from psycopg import sql

from controlplane.local.client import Client
from tests.controlplane.local.processes import wait_until
from tests.system.product import Product

PROMPT = "canary-prompt-9b1f4c7a2e"
LOST = "canary-password-55d0e1f3"
"""A password that is nobody's."""
SEEN = "canary-that-may-be-seen-41f7"
"""A request id: it has to be found, or the search proves nothing."""
AT_HOME = ("*.secret", "*.password", "admin.json", "demo.json", "valkey/valkey.conf")
"""Files that secrets belong in, readable by their owner alone."""


@dataclass
class Canaries:
    """What must not be found, by name, and the error bodies that came back."""

    secrets: dict[str, str]
    answers: list[bytes] = field(default_factory=list)

    def found_in(self, content: bytes, *, but: frozenset[str] = frozenset()) -> list[str]:
        """Names of those that `content` holds, as they are or in hex."""
        return [
            name
            for name, value in {**self.secrets, "prompt": PROMPT, "lost password": LOST}.items()
            if name not in but and (value.encode() in content or value.encode().hex().encode() in content)
        ]


def secrets_of(product: Product) -> dict[str, str]:
    found = {"api key": product.demo_key.split("_", 2)[2]}
    found |= {"password": product.credentials["password"], "admin token": product.credentials["api_token"]}
    for pattern in ("*.secret", "*.password"):
        found |= {path.name: path.read_text().strip() for path in product.home.glob(pattern)}
    return found


def log_in(product: Product, password: str) -> str:
    """What a browser does; the session cookie, or "" when refused."""
    client = Client(product.control_url)
    page = client.call("GET", "/login")
    client.cookies.update(page.cookies)
    token = page.body.decode().partition('name="_csrf_token" value="')[2].partition('"')[0]
    form = {"email": product.credentials["email"], "password": password, "_csrf_token": token}
    answer = client.call("POST", "/login", form=form)
    return answer.cookies.get("tidegate_session", "")


def send(url: str, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, bytes]:
    """One request with any headers; its status and body."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


def ask_models(product: Product, canaries: Canaries) -> None:
    """Inference that is answered, streamed, refused, malformed, too large, and from nobody."""
    chat = {"model": product.model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    bodies: list[Any] = [
        chat,
        {**chat, "stream": True, "logprobs": True, "echo": True},
        {**chat, "user": PROMPT, "stop": [PROMPT], "metadata": {"a": PROMPT}},
        {**chat, "max_tokens": -1},
        {**chat, "temperature": PROMPT},
        {**chat, "n": 10_000},
        {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {PROMPT: 1}}}},
        {**chat, "messages": [{"role": PROMPT, "content": PROMPT}]},
        {**chat, "messages": [{"role": "user", "content": f"{PROMPT} " * 4000}]},
        {**chat, "model": "no-such-model"},
    ]
    raw = [json.dumps(body).encode() for body in bodies]
    raw += [b'{"model": "' + PROMPT.encode(), b"\xff" + PROMPT.encode(), PROMPT.encode() * 200_000]
    for path in ("/v1/chat/completions", "/v1/completions"):
        for content in raw:
            if path == "/v1/completions":
                asked = content.replace(b'"messages"', b'"prompt": "' + PROMPT.encode() + b'", "messages"')
            else:
                asked = content
            headers = {"authorization": f"Bearer {product.demo_key}", "content-type": "application/json"}
            with contextlib.suppress(ConnectionError):
                send(product.gateway_url, "POST", path, headers, asked)


def misplace(product: Product, canaries: Canaries, secret: str) -> None:
    """`secret` in every place of a request, at every process."""
    key = {"authorization": f"Bearer {product.demo_key}"}
    operator = {"authorization": f"Bearer {product.credentials['api_token']}"}
    replica = json.loads((product.home / "run" / "endpoints.json").read_text())["replica_urls"][0]
    odd: list[dict[str, str]] = [
        {"authorization": f"Bearer {secret}"},
        {"authorization": f"Basic {secret}"},
        {"authorization": secret},
        {"cookie": f"tidegate_session={secret}"},
        {"x-api-key": secret, "x-csrftoken": secret, "x-tidegate-tenant": secret, "user-agent": secret},
    ]
    for url, good, paths in (
        (product.gateway_url, key, ("/v1/models", "/v1/chat/completions", "/metrics", "/nowhere")),
        (product.control_url, operator, ("/api/v1/tenants", "/tenants", "/login", "/metrics", "/internal/v1/reports")),
        (replica, {}, ("/v1/chat/completions", "/metrics", "/nowhere")),
    ):
        for path in paths:
            for headers in [*odd, *({**good, **one} for one in odd[3:])]:
                for method in ("GET", "POST"):
                    body = json.dumps({"password": secret, "token": secret, "url": f"http://u:{secret}@h/"}).encode()
                    _, answer = send(url, method, path, headers, body if method == "POST" else b"")
                    canaries.answers.append(answer)


def use_the_command_line(product: Product, canaries: Canaries, secret: str) -> None:
    """With the right token, and with `secret` in its place."""
    for token in (product.credentials["api_token"], secret):
        for command in (["tenants", "list"], ["keys", "list", "demo"], ["tenants", "create", "Not A Slug"]):
            done = subprocess.run(
                [sys.executable, "-m", "controlplane", *command],
                env={"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path), "TIDEGATE_CONTROL_URL": product.control_url,
                     "TIDEGATE_ADMIN_TOKEN": token, "TIDEGATE_HOME": str(product.home)},
                capture_output=True, check=False, timeout=60,
            )  # fmt: skip
            canaries.answers += [done.stdout, done.stderr]


def files_below(home: Path) -> Iterator[Path]:
    private = {path for pattern in AT_HOME for path in home.glob(pattern)}
    for path in home.rglob("*"):
        if path.is_file() and path not in private:
            yield path


def rows_of(product: Product) -> Iterator[tuple[str, bytes]]:
    """Every row of every table as text, binary columns in hex."""
    port = int((product.home / "pg" / "postmaster.pid").read_text().splitlines()[3])
    password = (product.home / "pg.password").read_text().strip()
    with psycopg.connect(f"postgresql://tidegate:{password}@127.0.0.1:{port}/tidegate") as connection:
        tables = connection.execute(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.relkind IN ('r', 'm') AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')"
        ).fetchall()
        assert len(tables) > 20
        for schema, table in tables:
            for (row,) in connection.execute(
                sql.SQL("SELECT t::text FROM {} AS t").format(sql.Identifier(schema, table))
            ):
                yield table, row.encode()


def keys_of(product: Product) -> Iterator[tuple[str, bytes]]:
    """Every key of Redis with all it holds."""
    conf = (product.home / "valkey" / "valkey.conf").read_text()
    port = next(int(line.split()[1]) for line in conf.splitlines() if line.startswith("port "))
    password = (product.home / "valkey.password").read_text().strip()
    with redis.Redis(port=port, password=password) as client:
        read = {b"string": client.get, b"hash": client.hgetall, b"set": client.smembers, b"stream": client.xrange,
                b"list": lambda key: client.lrange(key, 0, -1),
                b"zset": lambda key: client.zrange(key, 0, -1, withscores=True)}  # fmt: skip
        for key in client.scan_iter(count=1000):
            kind = client.type(key)
            if kind != b"none":
                yield key.decode(), key + repr(read[kind](key)).encode()


def metrics_of(product: Product) -> bytes:
    token = (product.home / "metrics.secret").read_text().strip()
    endpoints = json.loads((product.home / "run" / "endpoints.json").read_text())
    bodies = b""
    for url in (endpoints["control_url"], endpoints["gateway_url"], *endpoints["replica_urls"]):
        status, body = send(url, "GET", "/metrics", {"authorization": f"Bearer {token}"})
        assert status == 200
        bodies += body
    return bodies


@pytest.fixture(scope="module")
def canaries(product: Product) -> Canaries:
    """Everything was sent."""
    made = Canaries(secrets_of(product))
    ask_models(product, made)
    made.secrets["session cookie"] = log_in(product, product.credentials["password"])
    assert made.secrets["session cookie"]
    assert not log_in(product, LOST)
    for secret in [*made.secrets.values(), product.demo_key, LOST]:
        misplace(product, made, secret)
    use_the_command_line(product, made, LOST)
    ask = json.dumps({"model": product.model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1})
    named = {"authorization": f"Bearer {product.demo_key}", "x-request-id": SEEN}
    assert send(product.gateway_url, "POST", "/v1/chat/completions", named, ask.encode())[0] == 200
    assert wait_until(lambda: any(line["request_id"] == SEEN for line in product.request_log()), 10)
    assert wait_until(lambda: any(SEEN.encode() in row for _, row in rows_of(product)), 30), "it is in the ledger"
    send(product.gateway_url, "GET", "/v1/models", {"authorization": "Bearer x", "x-request-id": product.demo_key})
    assert "api key" in made.found_in(product.demo_key.encode()), "the search finds nothing"
    return made


def test_f33_no_file_holds_a_canary(product: Product, canaries: Canaries) -> None:
    leaks = [(path, found) for path in files_below(product.home) if (found := canaries.found_in(path.read_bytes()))]
    assert leaks == []
    assert any(SEEN.encode() in path.read_bytes() for path in files_below(product.home))
    shown_once = frozenset({"api key", "password", "admin token"})
    assert canaries.found_in(product.output.read_bytes(), but=shown_once) == []


def test_f33_what_belongs_in_a_file_is_its_owners_alone(product: Product, canaries: Canaries) -> None:
    private = [path for pattern in AT_HOME for path in product.home.glob(pattern)]
    assert len(private) >= 7
    assert [path.name for path in private if path.stat().st_mode & 0o077] == []


def test_f33_no_table_holds_a_canary(product: Product, canaries: Canaries) -> None:
    assert [(table, found) for table, row in rows_of(product) if (found := canaries.found_in(row))] == []


def test_f33_no_redis_key_holds_a_canary(product: Product, canaries: Canaries) -> None:
    held = list(keys_of(product))
    assert held
    assert [(key, found) for key, value in held if (found := canaries.found_in(value))] == []


def test_f33_no_metric_and_no_answer_holds_a_canary(product: Product, canaries: Canaries) -> None:
    assert canaries.found_in(metrics_of(product)) == []
    leaks = [(found, answer[:300]) for answer in canaries.answers if (found := canaries.found_in(answer))]
    assert leaks == []


def test_f33_no_command_line_holds_a_canary(product: Product, canaries: Canaries) -> None:
    for process in product.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            assert canaries.found_in(" ".join(process.cmdline()).encode()) == []
