"""Bad input through the gateway: the OpenAI-shaped error with the right status, and the engine goes on."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from controlplane.tenants import keys
from tests.system.product import Product

HELLO = [{"role": "user", "content": "Hello"}]


def send(product: Product, body: bytes, key: str) -> tuple[int, Any]:
    """POST raw bytes, as a broken client would."""
    parts = urlsplit(product.gateway_url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    try:
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Authorization", f"Bearer {key}")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused early: the answer is there
            connection.send(body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def assert_refused(status: int, answer: Any, expected: int) -> None:
    assert status == expected, answer
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert "Traceback" not in json.dumps(answer)


def assert_goes_on(product: Product) -> None:
    answer = product.as_tenant(
        "POST", "/v1/completions", {"model": product.model, "prompt": "One two", "max_tokens": 1}
    )
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "no-such-model"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "tide " * 20_000}]}, 400, "messages"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"n": 0}, 400, "n"),
        ({"top_p": "high"}, 400, "top_p"),
        ({"messages": "Hello"}, 400, "messages"),
        ({"stop": ["a"] * 100}, 400, "stop"),
    ],
)
def test_a_wrong_value_is_refused_and_named(product: Product, change: dict[str, Any], status: int, param: str) -> None:
    for stream in (False, True):
        body = {"model": product.model, "messages": HELLO, "max_tokens": 1, "stream": stream, **change}
        answered = product.as_tenant("POST", "/v1/chat/completions", body)
        assert_refused(answered.status, answered.json, status)
        assert answered.json["error"]["param"] == param
    assert_goes_on(product)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": NaN}', b'{"a":' * 2000])
def test_what_is_no_json_object_is_refused(product: Product, body: bytes) -> None:
    status, answer = send(product, body, product.demo_key)
    assert_refused(status, answer, 400)
    assert_goes_on(product)


def test_a_body_of_10_megabytes_is_refused(product: Product) -> None:
    body = json.dumps({"model": product.model, "messages": [{"role": "user", "content": "x" * 10_000_000}]})
    status, answer = send(product, body.encode(), product.demo_key)
    assert_refused(status, answer, 413)
    assert_goes_on(product)


def test_a_prompt_beyond_the_context_says_how_long_it_may_be(product: Product) -> None:
    body = {"model": product.model, "messages": [{"role": "user", "content": "tide " * 20_000}]}
    answered = product.as_tenant("POST", "/v1/chat/completions", body)
    assert answered.error_code == "context_length_exceeded"


@pytest.mark.parametrize("key", ["", "nonsense", "tg_short", keys.mint().plain.reveal()])
def test_an_unknown_key_is_refused(product: Product, key: str) -> None:
    answered = product.as_tenant("POST", "/v1/chat/completions", {"model": product.model, "messages": HELLO}, key=key)
    assert_refused(answered.status, answered.json, 401)
    if len(key) > 8:
        assert key not in answered.body.decode()


def test_a_key_without_access_to_the_model_is_refused_and_does_not_see_it(product: Product) -> None:
    key, _ = product.tenant_with_key("restricted", allowed_models=["another-model"])
    answered = product.as_tenant("POST", "/v1/chat/completions", {"model": product.model, "messages": HELLO}, key=key)
    assert answered.status in {403, 404}
    assert_refused(answered.status, answered.json, answered.status)
    listed = product.as_tenant("GET", "/v1/models", key=key)
    assert listed.json["data"] == []
