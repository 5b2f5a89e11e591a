"""A caller of the running product: plain HTTP, streamed answers timed as a client sees them.

Layer: service. Standard library only; used by `tidegate up --check`. It retries nothing.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, read to its end."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    cookies: Mapping[str, str]

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error_code(self) -> str:
        """The `code` of an OpenAI-shaped error body; empty when there is none."""
        try:
            return str(self.json["error"]["code"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return ""


@dataclass(slots=True)
class Streamed:
    """A streamed chat answer: its text, its usage, and when its first text came, in seconds from sending."""

    status: int
    text: str = ""
    first_s: float | None = None
    total_s: float = 0.0
    events: int = 0
    finished: bool = False
    """Whether `[DONE]` came."""
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


class Client:
    """Talks to one base URL; a new connection per call."""

    def __init__(self, base_url: str, token: str = "", cookies: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._token = token
        self.cookies = dict(cookies or {})

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        form: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Answer:
        """Raises OSError or http.client.HTTPException when there is no answer."""
        connection = http.client.HTTPConnection(*self._address, timeout=timeout)
        try:
            self._send(connection, method, path, json, form)
            response = connection.getresponse()
            body = response.read()
            jar: SimpleCookie = SimpleCookie()
            for value in response.headers.get_all("set-cookie") or []:
                jar.load(value)
            cookies = {name: morsel.value for name, morsel in jar.items()}
            self.cookies.update(cookies)
            return Answer(response.status, body, dict(response.headers), cookies)
        finally:
            connection.close()

    def stream_chat(self, body: Mapping[str, Any]) -> Streamed:
        """POST a streamed chat completion and read it to its end."""
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        begin = time.monotonic()
        try:
            asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
            self._send(connection, "POST", "/v1/chat/completions", asked, None)
            response = connection.getresponse()
            got = Streamed(response.status)
            if response.status != 200:
                got.error = msgspec.json.decode(response.read())["error"]
                return got
            while (line := response.readline()) and not got.finished:
                self._event(got, line.strip(), begin)
            got.total_s = time.monotonic() - begin
            return got
        finally:
            connection.close()

    @staticmethod
    def _event(got: Streamed, line: bytes, begin: float) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            got.finished = True
            return
        got.events += 1
        event = msgspec.json.decode(data)
        got.error = event.get("error") or got.error
        got.usage = event.get("usage") or got.usage
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content") or ""
            if text and got.first_s is None:
                got.first_s = time.monotonic() - begin
            got.text += text

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        json: Any,
        form: Mapping[str, str] | None,
    ) -> None:
        headers = {"Connection": "close"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if self.cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        body = None
        if json is not None:
            body, headers["Content-Type"] = msgspec.json.encode(json), "application/json"
        elif form is not None:
            body, headers["Content-Type"] = urlencode(form).encode(), "application/x-www-form-urlencoded"
        connection.request(method, path, body=body, headers=headers)
