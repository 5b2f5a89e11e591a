"""Opaque bearer tokens: console sessions and the admin API.

Layer: service. Pure. 256 random bits as text; what is stored is the SHA-256, which needs no salt or slow hash.
"""

from __future__ import annotations

import hashlib
import secrets

from controlplane.settings import Secret

API_PREFIX = "tga_"
_LONGEST = 256
"""Nothing longer is hashed: presented tokens come from strangers."""


def mint_api_token() -> Secret:
    """A new admin API token."""
    return Secret(API_PREFIX + secrets.token_hex(32))


def mint_session_token() -> Secret:
    """A new session id."""
    return Secret(secrets.token_urlsafe(32))


def digest(token: str) -> bytes | None:
    """What is stored of `token`; None when no token of ours looks like it."""
    if not 16 <= len(token) <= _LONGEST:
        return None
    return hashlib.sha256(token.encode()).digest()
