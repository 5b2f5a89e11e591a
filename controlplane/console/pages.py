"""Answering a page or its fragment from one handler.

Layer: service. A request of htmx gets the fragment, a visit or a restored history entry the whole page. It never
queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from litestar import MediaType, Request, Response
from litestar.datastructures import Cookie
from markupsafe import Markup

from controlplane.accounts.csrf import csrf_token
from controlplane.accounts.schemas import Principal
from controlplane.console.flash import Flash, take
from controlplane.console.live import Broadcaster
from controlplane.console.templates import Templates
from controlplane.errors import TidegateError

AnyRequest = Request[Any, Any, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """What was typed and what is wrong with it, by field; `""` holds what concerns the whole form.

    `idempotency_key` makes a form sent twice create once.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    idempotency_key: str = field(default_factory=lambda: uuid4().hex)

    def value(self, name: str) -> str:
        return self.values.get(name, "")

    def error(self, name: str) -> str:
        return self.errors.get(name, "")

    @classmethod
    def refused(cls, values: Mapping[str, str], error: TidegateError) -> Form:
        """The form again as it was filled in, with the service's sentence at the field it names."""
        name = error.param if error.param in values else ""
        return cls(values=values, errors={name or "": sentence(error.message)})


def sentence(message: str) -> str:
    """A service's message as a sentence on a page."""
    text = message[:1].upper() + message[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def wants_fragment(request: AnyRequest) -> bool:
    """htmx asks for a piece; a restored history entry needs the whole page."""
    return request.headers.get("hx-request") == "true" and request.headers.get("hx-history-restore-request") != "true"


@dataclass(frozen=True, slots=True)
class Console:
    """What the console's handlers share."""

    templates: Templates
    broadcaster: Broadcaster

    def answer(
        self,
        request: AnyRequest,
        *templates: str,
        user: Principal | None,
        section: str = "",
        status: int = 200,
        flash: Flash | None = None,
        **context: Any,
    ) -> Response[str]:
        """Render `templates` one after the other: one page, or a fragment with those swapped out of band. `flash` goes
        with a fragment; a page that is visited shows what waits for it.
        """
        ended: list[Cookie] = []
        if request.method == "GET" and not wants_fragment(request):
            flash, ended = take(request)
        common = {"user": user, "section": section, "csrf_token": csrf_token(request), "flash": flash, **context}
        body = Markup().join(self.templates.render(name, **common) for name in templates)
        headers = {"vary": "HX-Request"}
        return Response(body, status_code=status, media_type=MediaType.HTML, headers=headers, cookies=ended)
