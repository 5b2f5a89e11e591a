"""Logging in and out. Layer: service. The accounts service decides; the page never tells whether an account exists."""

from __future__ import annotations

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, URLEncodedBody
from litestar.response import Redirect

from controlplane.accounts import service
from controlplane.accounts.browser import LOGIN_PATH, safe_next
from controlplane.console.pages import AnyRequest, Console, sentence
from controlplane.errors import AuthenticationError, RateLimitedError


class LoginForm(msgspec.Struct, frozen=True):
    """Never logged and never echoed, but for the email."""

    email: str = ""
    password: str = ""
    next: str = "/"


@get("/login", include_in_schema=False)
async def login_page(
    request: AnyRequest, console: NamedDependency[Console], next: FromQuery[str | None] = None
) -> Response[str] | Redirect:
    if await service.principal_of_session(request) is not None:
        return Redirect(safe_next(next), status_code=303)
    return console.answer(request, "session/login.html", user=None, email="", error="", next=safe_next(next))


@post("/login", include_in_schema=False, status_code=303)
async def login(
    request: AnyRequest, console: NamedDependency[Console], data: URLEncodedBody[LoginForm]
) -> Response[str] | Redirect:
    target = safe_next(data.next)
    try:
        cookie = await service.login(request, data.email, data.password)
    except (AuthenticationError, RateLimitedError) as error:
        response = console.answer(
            request,
            "session/login.html",
            user=None,
            status=error.status,
            email=data.email[:254],
            error=sentence(error.message),
            next=target,
        )
        response.headers.update(error.headers)
        return response
    return Redirect(target, status_code=303, cookies=[cookie])


@post("/logout", include_in_schema=False, status_code=303)
async def logout(request: AnyRequest) -> Redirect:
    return Redirect(LOGIN_PATH, status_code=303, cookies=[await service.logout(request)])
