"""Who a request is from: API keys and their grants.

Layer: service. How long a grant is believed is `PolicyCache`'s: when Postgres cannot answer, known keys go on and
unknown ones get 503, never 401 (F15). A revoked key is refused within 2 s (F16). Look-ups of unknown keys are rationed,
so that junk keys can neither fill memory nor hammer Postgres. Keys are never logged and never part of a message.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable

from controlplane.errors import AuthenticationError, PermissionDeniedError
from controlplane.gateway.cache import PolicyCache
from controlplane.gateway.policy import PolicyChange
from controlplane.tenants.keys import MalformedKeyError, ParsedKey, parse, verify
from controlplane.tenants.schemas import KeyGrant

CAPACITY = 20_000
"""Keys known, and as many known to be none."""
UNKNOWN_PER_S = 100.0
UNKNOWN_BURST = 500.0

LoadGrant = Callable[[str], Awaitable[KeyGrant | None]]


class _Ration:
    """Look-ups of keys never seen before; those that turn out to be real are given back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = UNKNOWN_BURST
        self._refilled = clock()

    def spend(self) -> bool:
        now = self._clock()
        self._left = min(UNKNOWN_BURST, self._left + (now - self._refilled) * UNKNOWN_PER_S)
        self._refilled = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def give_back(self) -> None:
        self._left = min(UNKNOWN_BURST, self._left + 1.0)


class KeyDirectory:
    """Grants by key id. `load` reads one grant from Postgres: None when there is no such key, any exception when
    Postgres cannot answer. `on_learned` is called whenever a known grant came or changed.
    """

    def __init__(
        self,
        load: LoadGrant,
        *,
        on_learned: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._wall = wall
        self.cache = PolicyCache(
            load,
            noun="API keys",
            busy_code="key_lookups_busy",
            capacity=CAPACITY,
            ration=_Ration(clock),
            on_learned=on_learned,
            clock=clock,
        )
        self.on_listening = self.cache.on_listening
        self.on_silence = self.cache.on_silence
        self.close = self.cache.close

    async def authenticate(self, authorization: str | None) -> KeyGrant:
        """The grant of the key in an Authorization header.

        Raises AuthenticationError (401) for a missing, malformed, unknown, revoked or expired key,
        PermissionDeniedError (403) for a tenant, project or owner that is not active, CapacityError (503) when nobody
        can tell.
        """
        parsed = _read_header(authorization)
        return self._judge(parsed, await self.cache.get(parsed.key_id))

    def known(self) -> list[KeyGrant]:
        """Every cached grant, most recently used last."""
        return self.cache.known()

    def adopt(self, grants: Iterable[KeyGrant]) -> None:
        """Take grants of an earlier run: used only while Postgres cannot answer."""
        for grant in grants:
            self.cache.adopt(grant.key_id, grant)

    def on_change(self, change: PolicyChange) -> None:
        """A committed change of a key or of what it belongs to; an empty id means any row."""
        if change.table == "api_keys" and change.id:
            self.cache.invalidate(change.id)
        elif change.table in {"api_keys", "tenants", "projects", "principals"}:
            self.cache.invalidate_where(lambda grant: not change.id or change.id in {grant.tenant_id, grant.tenant})

    def _judge(self, parsed: ParsedKey, grant: KeyGrant | None) -> KeyGrant:
        if grant is None or not verify(parsed, grant):
            raise AuthenticationError("The API key is not known.")
        if grant.revoked:
            raise AuthenticationError("The API key was revoked.", code="api_key_revoked")
        if grant.expires_at is not None and grant.expires_at <= self._wall():
            raise AuthenticationError("The API key has expired.", code="api_key_expired")
        if not grant.tenant_active:
            raise PermissionDeniedError("The tenant of this API key is not active.", code="tenant_inactive")
        if not grant.project_active:
            raise PermissionDeniedError("The project of this API key is not active.", code="project_inactive")
        if not grant.principal_active:
            raise PermissionDeniedError("The owner of this API key is not active.", code="principal_inactive")
        return grant


def _read_header(authorization: str | None) -> ParsedKey:
    if authorization is None:
        raise AuthenticationError(
            "You didn't provide an API key. Send it in an Authorization header: 'Bearer <key>'.",
            code="missing_api_key",
        )
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer":
        raise AuthenticationError("The Authorization header must read 'Bearer <key>'.")
    try:
        return parse(token.strip())
    except MalformedKeyError:
        raise AuthenticationError("The API key is malformed.") from None
