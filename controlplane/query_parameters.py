"""Refusing query parameters that a route of the admin API does not know.

Layer: service. A guard of the whole application: a misspelt filter must not read as no filter. Pages ignore what they
do not know, so that links from anywhere still open.
"""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.params import QueryParameter

from controlplane.errors import InvalidRequestError

API = "/api/"


def refuse_unknown(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Raises InvalidRequestError naming the first parameter that `handler` does not take, and those it does."""
    if not connection.scope["path_template"].startswith(API):
        return
    accepted = {
        definition.query or name
        for name, field in handler.parsed_fn_signature.parameters.items()
        if isinstance(definition := field.kwarg_definition, QueryParameter)
    }
    unknown = next((name for name in connection.query_params if name not in accepted), None)
    if unknown is not None:
        known = f"it takes {', '.join(sorted(accepted))}" if accepted else "it takes none"
        raise InvalidRequestError(
            f"there is no query parameter {unknown[:100]!r} here; {known}",
            code="unknown_parameter",
            param=unknown[:100],
        )
