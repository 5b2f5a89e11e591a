"""The id one request carries through all logs and processes.

Layer: service. A client's `x-request-id` is kept when it is harmless, else replaced; handlers read either the
scope or the header, which agree. Never trusted for anything but naming.
"""

from __future__ import annotations

import random
import re
from typing import Any

from dataplane.protocol import HEADER_REQUEST

_NAME = HEADER_REQUEST.encode()
_HARMLESS = re.compile(rb"(?!.*tga?_)[A-Za-z0-9._:-]{1,128}", re.IGNORECASE)
"""Ids are logged and stored, so none may look like an API key or an admin token (F33)."""


def assign(scope: Any) -> bytes:
    """Settle this request's id in the scope's state and headers."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given = next((value for name, value in headers if name == _NAME), None)
    if given is not None and _HARMLESS.fullmatch(given):
        identifier = given
    else:
        identifier = b"%032x" % random.getrandbits(128)  # a name, not a secret
        scope["headers"] = [pair for pair in headers if pair[0] != _NAME] + [(_NAME, identifier)]
    scope["state"]["request_id"] = identifier.decode()
    return identifier


def request_id(scope: Any) -> str:
    """This request's id."""
    identifier: str = scope["state"].get("request_id", "")
    return identifier
