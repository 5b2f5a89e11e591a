"""What protects a browser: cookies, security headers, redirects to the login page.

Layer: service. Pure configuration and small pure functions. The policy allows scripts and styles from files of
this origin only: no inline script, no inline style, no other host. Scripts may still set styles through the DOM
(`element.style`), which the policy does not touch; htmx must run with `includeIndicatorStyles: false`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import quote

from litestar import MediaType, Request, Response
from litestar.datastructures import Cookie
from litestar.response import Redirect

from controlplane.errors import AuthenticationError
from controlplane.settings import Secret, Settings

LOGIN_PATH = "/login"

BEARER_ONLY = ("/api/", "/internal/", "/metrics", "/healthz")
"""Route templates that take no cookie, so no other site can act through one."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
    )
)


class LoginRequiredError(AuthenticationError):
    """Nobody is logged in; pages send the browser to the login form."""

    default_code = "login_required"


def security_headers(settings: Settings) -> tuple[tuple[bytes, bytes], ...]:
    """Headers of every response of the control plane, unless the handler set its own."""
    headers = {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "same-origin",
        "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }
    if settings.cookie_secure:
        headers["strict-transport-security"] = "max-age=31536000; includeSubDomains"
    return tuple((name.encode(), value.encode()) for name, value in headers.items())


def session_cookie_name(settings: Settings) -> str:
    """With TLS the browser itself refuses the cookie from another host, path or plain HTTP."""
    return "__Host-tidegate_session" if settings.cookie_secure else "tidegate_session"


def session_cookie(settings: Settings, token: Secret, lifetime: timedelta) -> Cookie:
    """The cookie that carries a session."""
    return Cookie(
        key=session_cookie_name(settings),
        value=token.reveal(),
        path="/",
        httponly=True,
        samesite="lax",
        secure=settings.cookie_secure,
        max_age=int(lifetime.total_seconds()),
    )


def ended_cookie(settings: Settings) -> Cookie:
    """The cookie that removes it."""
    return Cookie(
        key=session_cookie_name(settings),
        value="",
        path="/",
        httponly=True,
        samesite="lax",
        secure=settings.cookie_secure,
        max_age=0,
    )


def safe_next(target: str | None) -> str:
    """Where to go after a login: a path of this console, never another host."""
    if target is None or not target.startswith("/") or target.startswith(("//", "/\\")) or not target.isprintable():
        return "/"
    return "/" if target.split("?")[0] == LOGIN_PATH or "\\" in target else target


def on_login_required(request: Request[Any, Any, Any], error: LoginRequiredError) -> Response[Any]:
    """A page goes to the login form and comes back; a fragment makes htmx do so; anything else gets 401."""
    if request.headers.get("hx-request") == "true":
        return Response("", status_code=401, headers={"hx-redirect": LOGIN_PATH}, media_type=MediaType.TEXT)
    accept = request.headers.get("accept", "")
    if request.method in {"GET", "HEAD"} and ("text/html" in accept or accept in {"", "*/*"}):
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        suffix = "" if here == "/" else f"?next={quote(here, safe='/')}"
        return Redirect(LOGIN_PATH + suffix, status_code=303)
    return Response(error.message, status_code=401, media_type=MediaType.TEXT)
