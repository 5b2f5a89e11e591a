"""The command line's HTTP client of the admin API.

Layer: service. Synchronous and dependency-free. It finds the control plane and the token in the environment or in
the home folder of `tidegate up`, never prints the token, and turns every failure into one sentence.
"""

from __future__ import annotations

import http.client
import os
import ssl
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from controlplane.settings import Secret

DEFAULT_URL = "http://127.0.0.1:7300"
TIMEOUT_S = 15.0
_LARGEST_ANSWER = 16 * 1024 * 1024
_PIECE = 64 * 1024


class AdminApiError(Exception):
    """One sentence for the person at the terminal; `usage` when their input or environment is at fault."""

    def __init__(self, message: str, *, usage: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.usage = usage


class _AdminFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `tidegate up` leaves in its home folder; both files are read with this."""

    control_url: str = ""
    api_token: str = ""


class AdminClient:
    """Calls one control plane. Raises AdminApiError only."""

    def __init__(self, url: str, token: Secret) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise AdminApiError(f"{url} is not the URL of a control plane", usage=True)
        self._url = url.rstrip("/")
        self._parts = parts
        self._token = token

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """The decoded answer of `/api/v1` + `path`."""
        status, raw = self._send(method, f"{self._parts.path.rstrip('/')}/api/v1{path}", body, headers or {})
        try:
            answer = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            raise AdminApiError(
                f"{self._url} does not answer like a Tidegate control plane (status {status})"
            ) from None
        if 200 <= status < 300:
            return answer
        raise AdminApiError(_sentence(answer, status), usage=status in {400, 422})

    def pages(self, path: str, **filters: str) -> Iterator[Any]:
        """Every item of a paged list, narrowed by `filters`."""
        after: str | None = None
        while True:
            query = urlencode({"limit": 200, **filters, **({"after": after} if after else {})})
            answer = self.call("GET", f"{path}?{query}")
            yield from answer["items"]
            after = answer.get("next")
            if after is None:
                return

    def download(self, path: str, write: Callable[[bytes], object]) -> None:
        """Hand the body of `/api/v1` + `path` to `write`, piece by piece. One that ends early is an error.

        Raises also what `write` raises.
        """
        with closing(self._pieces(path)) as pieces:
            for piece in pieces:
                write(piece)

    def _pieces(self, path: str) -> Generator[bytes, None, None]:
        connection = self._connection()
        try:
            connection.request("GET", f"{self._parts.path.rstrip('/')}/api/v1{path}", headers=self._headers({}))
            response = connection.getresponse()
            if response.status != 200:
                raw = response.read(_LARGEST_ANSWER)
                raise AdminApiError(_sentence_of(raw, response.status), usage=response.status in {400, 422})
            while piece := response.read1(_PIECE):
                yield piece
        except (OSError, ssl.SSLError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        connection = self._connection()
        sent = self._headers(headers)
        encoded = None
        if body is not None:
            encoded = msgspec.json.encode(body)
            sent["content-type"] = "application/json"
        try:
            connection.request(method, path, body=encoded, headers=sent)
            response = connection.getresponse()
            return response.status, response.read(_LARGEST_ANSWER)
        except (OSError, ssl.SSLError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        assert self._parts.hostname is not None
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname, self._parts.port, timeout=TIMEOUT_S)

    def _headers(self, more: Mapping[str, str]) -> dict[str, str]:
        return {"authorization": f"Bearer {self._token.reveal()}", "accept": "application/json", **more}

    def _unreachable(self, error: Exception) -> AdminApiError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return AdminApiError(f"cannot reach the control plane at {self._url}: {reason}; is `tidegate up` running?")


def connect(home: Path, environment: Mapping[str, str] | None = None) -> AdminClient:
    """The client for TIDEGATE_CONTROL_URL and TIDEGATE_ADMIN_TOKEN, or for what `home` says. Raises AdminApiError."""
    environment = os.environ if environment is None else environment
    url, token = environment.get("TIDEGATE_CONTROL_URL", ""), environment.get("TIDEGATE_ADMIN_TOKEN", "")
    if not token:
        token = _read(home / "admin.json").api_token
        if not token:
            raise AdminApiError(
                f"no admin token in {home}: set TIDEGATE_ADMIN_TOKEN, or pass --home with the folder of `tidegate up`",
                usage=True,
            )
    if not url:
        url = _read(home / "run" / "endpoints.json").control_url or _read(home / "admin.json").control_url
    return AdminClient(url or DEFAULT_URL, Secret(token))


def segment(text: str) -> str:
    """`text` as one segment of a path."""
    return quote(text, safe="")


def _read(file: Path) -> _AdminFile:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_AdminFile)
    except FileNotFoundError:
        return _AdminFile()
    except OSError as error:
        raise AdminApiError(f"cannot read {file}: {error.strerror}", usage=True) from None
    except msgspec.DecodeError:
        raise AdminApiError(f"{file} is damaged: it is not the JSON that `tidegate up` writes", usage=True) from None


def _sentence_of(raw: bytes, status: int) -> str:
    try:
        return _sentence(msgspec.json.decode(raw), status)
    except msgspec.DecodeError:
        return _sentence(None, status)


def _sentence(answer: Any, status: int) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message) if message else f"the control plane answered with status {status}"
