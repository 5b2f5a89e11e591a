"""What the tenants service answers to other domains. Layer: service."""

from __future__ import annotations

import msgspec


class KeyGrant(msgspec.Struct, frozen=True, kw_only=True):
    """All a gateway needs to know of one API key. `allowed_models` None means every model of every pool.

    `secret_hash` is SHA-256 of the key's secret part. `cache_salt` isolates the tenant's KV prefix cache.
    """

    key_id: str
    secret_hash: bytes
    tenant_id: str
    tenant: str
    cache_salt: str
    allowed_models: tuple[str, ...] | None
    revoked: bool
    tenant_active: bool
    expires_at: float | None = None
    priority: int = 0
