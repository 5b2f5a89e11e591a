"""What is said once after a change, on the page it leads to: "Limit set: 100 requests a minute for acme".

Layer: service. The words wait in a cookie of the browser, so that no page costs a query more. It is signed for the
session: no link, no other session and no earlier login of the same browser can put words on a page. The page that shows
them ends the cookie. A secret must never be among them.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.datastructures import Cookie
from litestar.response import Redirect

from controlplane.accounts.browser import session_cookie_name
from controlplane.settings import Settings

KEPT_S = 60
"""How long the words wait for a page; after that nobody remembers what they are about."""
LONGEST = 200
"""Characters of each part, so that a browser takes the cookie: it refuses more than 4,096 bytes."""

AnyRequest = Request[Any, Any, Any]


class Flash(msgspec.Struct, frozen=True):
    """What was done, and what follows from it."""

    title: str
    text: str = ""


def go(request: AnyRequest, path: str, flash: Flash) -> Response[str] | Redirect:
    """After a change, to the page that says so: htmx is told where to go, a plain form is redirected."""
    cookie = _cookie(request, _pack(request, flash), KEPT_S)
    if request.headers.get("hx-request") == "true":
        return Response("", status_code=200, headers={"hx-redirect": path}, cookies=[cookie])
    return Redirect(path, status_code=303, cookies=[cookie])


def take(request: AnyRequest) -> tuple[Flash | None, list[Cookie]]:
    """What waits for the page that answers `request`, and the cookie that ends it. Words that another login was told
    are None.
    """
    waiting = request.cookies.get(cookie_name(_settings(request)))
    return (None, []) if waiting is None else (_unpack(request, waiting), [_cookie(request, "", 0)])


def cookie_name(settings: Settings) -> str:
    """With TLS the browser itself refuses the cookie from another host, path or plain HTTP."""
    return "__Host-tidegate_flash" if settings.cookie_secure else "tidegate_flash"


def _pack(request: AnyRequest, flash: Flash) -> str:
    words = msgspec.json.encode(Flash(_cut(flash.title), _cut(flash.text)))
    payload = urlsafe_b64encode(words).decode()
    return f"{payload}.{_signature(request, payload)}"


def _unpack(request: AnyRequest, waiting: str) -> Flash | None:
    payload, _, signature = waiting.partition(".")
    if not hmac.compare_digest(signature.encode(), _signature(request, payload).encode()):
        return None
    return msgspec.json.decode(urlsafe_b64decode(payload), type=Flash)


def _signature(request: AnyRequest, payload: str) -> str:
    settings = _settings(request)
    session = request.cookies.get(session_cookie_name(settings), "")
    secret = settings.session_secret.reveal().encode()
    return hmac.new(secret, f"flash\0{session}\0{payload}".encode(), hashlib.sha256).hexdigest()


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _cookie(request: AnyRequest, value: str, max_age: int) -> Cookie:
    settings = _settings(request)
    return Cookie(
        key=cookie_name(settings),
        value=value,
        path="/",
        httponly=True,
        samesite="lax",
        secure=settings.cookie_secure,
        max_age=max_age,
    )


def _settings(request: AnyRequest) -> Settings:
    settings: Settings = request.app.state.resources.settings
    return settings
