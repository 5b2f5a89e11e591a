"""Who a request is from: API keys, their grants, and how long a grant may be believed.

Layer: service. A grant is believed as long as the gateway is listening for policy changes; while it is not, a grant
older than `MAX_AGE_S` is read again first. When Postgres cannot answer, known keys go on and unknown ones get 503,
never 401 (F15). A revoked key is refused within 2 s (F16). Every cache and every read is bounded, so that junk keys
can neither fill memory nor hammer Postgres. Keys are never logged and never part of a message.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

from controlplane.errors import AuthenticationError, CapacityError, PermissionDeniedError
from controlplane.gateway.errors import capacity
from controlplane.gateway.policy import PolicyChange
from controlplane.tenants.keys import MalformedKeyError, ParsedKey, parse, verify
from controlplane.tenants.schemas import KeyGrant

MAX_AGE_S = 1.0
"""Longest a grant is believed while nobody would tell of a change."""
READ_TIMEOUT_S = 3.0
KNOWN_WAIT_S = 0.5
"""Longest a known key waits for its grant to be read again before Postgres counts as away."""
RETRY_S = 0.5
"""After a failed read, no other is tried for about this long."""
CAPACITY = 20_000
UNKNOWN_CAPACITY = 20_000
READS_AT_ONCE = 4
READS_WAITING = 256
UNKNOWN_PER_S = 100.0
UNKNOWN_BURST = 500.0

logger = logging.getLogger("tidegate.gateway")

LoadGrant = Callable[[str], Awaitable[KeyGrant | None]]


class _Entry:
    """One key as last read. `changed` says that a change was announced since: it must be read before it is used."""

    __slots__ = ("changed", "generation", "grant", "read_at")

    def __init__(self, grant: KeyGrant | None, read_at: float, generation: int) -> None:
        self.grant = grant
        self.read_at = read_at
        self.generation = generation
        self.changed = False


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
        self._load = load
        self._on_learned = on_learned
        self._clock = clock
        self._wall = wall
        self._known: OrderedDict[str, _Entry] = OrderedDict()
        self._unknown: OrderedDict[str, _Entry] = OrderedDict()
        self._reads: dict[str, asyncio.Task[_Entry]] = {}
        self._dirty: set[str] = set()
        """Keys of reads in flight that were announced as changed meanwhile."""
        self._slots = asyncio.Semaphore(READS_AT_ONCE)
        self._listening = False
        self._generation = 0
        self._away_until = 0.0
        self._away = False
        self._unknown_budget = UNKNOWN_BURST
        self._unknown_refilled = clock()

    async def authenticate(self, authorization: str | None) -> KeyGrant:
        """The grant of the key in an Authorization header.

        Raises AuthenticationError (401) for a missing, malformed, unknown, revoked or expired key,
        PermissionDeniedError (403) for a tenant, project or owner that is not active, CapacityError (503) when nobody
        can tell.
        """
        parsed = _read_header(authorization)
        entry = self._known.get(parsed.key_id) or self._unknown.get(parsed.key_id)
        if entry is None or not self._believed(entry):
            entry = await self._read_again(parsed.key_id, entry)
        else:
            (self._known if entry.grant else self._unknown).move_to_end(parsed.key_id)
        return self._judge(parsed, entry.grant)

    def known(self) -> list[KeyGrant]:
        """Every cached grant, most recently used last."""
        return [entry.grant for entry in self._known.values() if entry.grant is not None and not entry.changed]

    def adopt(self, grants: Iterable[KeyGrant]) -> None:
        """Take grants of an earlier run: used only while Postgres cannot answer."""
        for grant in grants:
            if grant.key_id not in self._known:
                self._known[grant.key_id] = _Entry(grant, self._clock(), -1)
        self._shrink()

    def on_listening(self) -> None:
        """Changes may have been missed before now: every grant is read again before it is next believed."""
        self._listening = True
        self._generation += 1
        self._away_until = 0.0

    def on_silence(self) -> None:
        self._listening = False

    def on_change(self, change: PolicyChange) -> None:
        """A committed change of a key or a tenant; an empty id means any row."""
        if change.table == "api_keys" and change.id:
            self._invalidate(change.id)
        elif change.table in {"api_keys", "tenants", "projects", "principals"}:
            for key_id, entry in self._known.items():
                grant = entry.grant
                if not change.id or (grant is not None and change.id in {grant.tenant_id, grant.tenant}):
                    self._invalidate(key_id)
            self._unknown.clear()
            self._dirty.update(self._reads)

    async def close(self) -> None:
        reads = list(self._reads.values())
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    def _invalidate(self, key_id: str) -> None:
        self._unknown.pop(key_id, None)
        if (entry := self._known.get(key_id)) is not None:
            entry.changed = True
            self._on_learned()
        if key_id in self._reads:
            self._dirty.add(key_id)

    def _believed(self, entry: _Entry) -> bool:
        if entry.changed or entry.generation != self._generation:
            return False
        return self._listening or self._clock() - entry.read_at <= MAX_AGE_S

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

    async def _read_again(self, key_id: str, entry: _Entry | None) -> _Entry:
        """The entry as read now, or the old one when Postgres cannot answer and no change of it is known."""
        fallback = entry if entry is not None and entry.grant is not None and not entry.changed else None
        if self._clock() < self._away_until:
            return self._without_postgres(fallback)
        read = self._reads.get(key_id)
        if read is None:
            if len(self._reads) >= READS_WAITING or (entry is None and not self._may_look_up()):
                if fallback is not None:
                    return fallback
                raise capacity("Too many unknown API keys are being looked up; try again.", "key_lookups_busy")
            read = asyncio.create_task(self._read(key_id), name=f"read grant {key_id}")
            self._reads[key_id] = read
            read.add_done_callback(lambda done: self._read_ended(key_id, done))
        try:
            timeout = READ_TIMEOUT_S if fallback is None else KNOWN_WAIT_S
            return await asyncio.wait_for(asyncio.shield(read), timeout)
        except TimeoutError:
            self._postgres_failed("no answer in time")
        except CapacityError:
            pass
        return self._without_postgres(fallback)

    def _without_postgres(self, fallback: _Entry | None) -> _Entry:
        if fallback is None:
            raise capacity("API keys cannot be looked up at the moment; try again.", "policy_unavailable")
        return fallback

    async def _read(self, key_id: str) -> _Entry:
        """Read one grant, again if a change of it was announced while it was being read."""
        async with self._slots:
            while True:
                self._dirty.discard(key_id)
                generation = self._generation
                started = self._clock()
                try:
                    async with asyncio.timeout(READ_TIMEOUT_S):
                        grant = await self._load(key_id)
                except Exception as error:
                    self._postgres_failed(type(error).__name__)
                    raise capacity("API keys cannot be looked up at the moment.", "policy_unavailable") from error
                if key_id not in self._dirty and generation == self._generation:
                    break
        if self._away:
            self._away = False
            logger.info("API keys can be read again")
        return self._store(key_id, _Entry(grant, started, generation))

    def _read_ended(self, key_id: str, read: asyncio.Task[_Entry]) -> None:
        self._reads.pop(key_id, None)
        self._dirty.discard(key_id)
        if not read.cancelled():
            read.exception()  # those who wait have it; with nobody left it is not news

    def _store(self, key_id: str, entry: _Entry) -> _Entry:
        if entry.grant is None:
            self._known.pop(key_id, None)
            self._unknown[key_id] = entry
            self._unknown.move_to_end(key_id)
        else:
            self._unknown.pop(key_id, None)
            previous = self._known.get(key_id)
            self._known[key_id] = entry
            self._known.move_to_end(key_id)
            if previous is None:
                self._unknown_budget = min(UNKNOWN_BURST, self._unknown_budget + 1.0)
            if previous is None or previous.grant != entry.grant or previous.changed:
                self._on_learned()
        self._shrink()
        return entry

    def _shrink(self) -> None:
        while len(self._known) > CAPACITY:
            self._known.popitem(last=False)
        while len(self._unknown) > UNKNOWN_CAPACITY:
            self._unknown.popitem(last=False)

    def _may_look_up(self) -> bool:
        """Look-ups of keys never seen before are rationed; those that turn out to be real are given back."""
        now = self._clock()
        earned = (now - self._unknown_refilled) * UNKNOWN_PER_S
        self._unknown_budget = min(UNKNOWN_BURST, self._unknown_budget + earned)
        self._unknown_refilled = now
        if self._unknown_budget < 1.0:
            return False
        self._unknown_budget -= 1.0
        return True

    def _postgres_failed(self, why: str) -> None:
        self._away_until = self._clock() + RETRY_S * random.uniform(0.8, 1.2)  # noqa: S311  # spreads retries, hides nothing
        if not self._away:
            self._away = True
            logger.warning("API keys cannot be read from Postgres (%s); known keys go on", why)


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
