"""That a form was sent by a page of this console, to the very browser that was shown it.

Layer: service. Every change on a page repeats a token that is derived from the browser's session cookie, or from a
cookie of its own as long as nobody is logged in: a token of another session, or one from before the login, opens
nothing. Paths that take no cookie are left out. It looks nothing up: whether the session lives is the guards' business.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie, MutableScopeHeaders
from litestar.enums import RequestEncodingType, ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.accounts.browser import BEARER_ONLY, session_cookie_name
from controlplane.errors import PermissionDeniedError
from controlplane.settings import Settings

COOKIE = "tidegate_csrf"
FIELD = "_csrf_token"
HEADER = "x-csrftoken"
READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""

_MINTED = "csrf_nonce"
"""In the scope's state: the cookie value that this response must set."""
_FORMS = frozenset({RequestEncodingType.URL_ENCODED, RequestEncodingType.MULTI_PART})

Connection = ASGIConnection[Any, Any, Any, Any]


def csrf_token(connection: Connection) -> str:
    """What a form of this page must send back, as the field `_csrf_token` or the header x-csrftoken."""
    token = _expected(connection)
    if token is None:
        nonce = connection.scope["state"].setdefault(_MINTED, secrets.token_hex(32))
        token = _derived(_settings(connection), "login", nonce)
    return token


class CsrfMiddleware(ASGIMiddleware):
    """Refuses changes without the browser's own token or from another site; sets the cookie of a first visit."""

    scopes = (ScopeType.HTTP,)

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        request: Request[Any, Any, Any] = Request(scope, receive, send)
        if request.method not in READING and not scope["path_template"].startswith(BEARER_ONLY):
            await _require_token(request)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and (nonce := scope["state"].get(_MINTED)) is not None:
                cookie = _cookie(_settings(request), nonce)
                MutableScopeHeaders.from_message(message).add("set-cookie", cookie.to_header(header=""))
            await send(message)

        await next_app(scope, receive, answer)


async def _require_token(request: Request[Any, Any, Any]) -> None:
    """Raises PermissionDeniedError."""
    if request.headers.get("sec-fetch-site") in {"cross-site", "same-site"}:
        raise PermissionDeniedError("this form was sent from another site", code="cross_origin")
    given = request.headers.get(HEADER)
    if given is None and request.content_type[0] in _FORMS:
        given = (await request.form()).get(FIELD)
    expected = _expected(request)
    if expected is None or not isinstance(given, str) or not hmac.compare_digest(given.encode(), expected.encode()):
        raise PermissionDeniedError(
            "this form is out of date, or was not sent by this console: load the page again", code="csrf_token"
        )


def _expected(connection: Connection) -> str | None:
    """The token of the browser's session, or of its own cookie before a login; None when it has neither."""
    settings = _settings(connection)
    for kind, name in (("session", session_cookie_name(settings)), ("login", COOKIE)):
        if value := connection.cookies.get(name):
            return _derived(settings, kind, value)
    return None


def _derived(settings: Settings, kind: str, value: str) -> str:
    secret = settings.session_secret.reveal().encode()
    return hmac.new(secret, f"csrf\0{kind}\0{value}".encode(), hashlib.sha256).hexdigest()


def _cookie(settings: Settings, nonce: str) -> Cookie:
    return Cookie(key=COOKIE, value=nonce, path="/", httponly=True, samesite="lax", secure=settings.cookie_secure)


def _settings(connection: Connection) -> Settings:
    settings: Settings = connection.app.state.resources.settings
    return settings
