"""Slowing down password guessing, by account and by address.

Layer: service. Counts attempts before they are checked, in Redis, so all control-plane processes share one count
and concurrent attempts cannot slip past. While Redis is away each process counts for itself: guessing stays
bounded and nobody is locked out by the outage. Emails and addresses are hashed into keys, never stored as text.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisAwayError
from redis.exceptions import TimeoutError as RedisTimeoutError

from controlplane.errors import RateLimitedError


class Limit(msgspec.Struct, frozen=True):
    """At most `attempts` within `window_s`, counted from the first."""

    attempts: int
    window_s: int


PAIR = Limit(5, 300)
"""One account from one address: ordinary mistyping stays below."""
ACCOUNT = Limit(50, 900)
"""One account from anywhere: wide, so that a stranger cannot lock its owner out quickly."""
ADDRESS = Limit(40, 300)
"""One address over all accounts."""

# Refuses without counting when any window is full, else counts one in each; answers the seconds to wait, or 0.
_TAKE = """
local wait = 0
for i, key in ipairs(KEYS) do
  if tonumber(redis.call('GET', key) or '0') >= tonumber(ARGV[2 * i - 1]) then
    wait = math.max(wait, redis.call('PTTL', key))
  end
end
if wait > 0 then return wait end
for i, key in ipairs(KEYS) do
  if redis.call('INCR', key) == 1 then redis.call('EXPIRE', key, ARGV[2 * i]) end
end
return 0
"""


class LoginThrottle:
    """One process's view of the shared counts."""

    def __init__(self, redis: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._local = LocalWindows(clock)

    async def attempt(self, email: str, address: str) -> None:
        """Count one attempt. Raises RateLimitedError with Retry-After when a window is full."""
        keys = _keys(email, address)
        try:
            limits = [number for limit in keys.values() for number in (limit.attempts, limit.window_s)]
            wait_s = await self._redis.eval(_TAKE, len(keys), *keys, *limits) / 1000
        except (RedisAwayError, RedisTimeoutError):
            wait_s = self._local.take(keys)
        if wait_s > 0:
            seconds = max(1, math.ceil(wait_s))
            raise RateLimitedError(
                f"too many login attempts; try again in {seconds} seconds",
                code="too_many_logins",
                headers={"retry-after": str(seconds)},
            )

    async def succeeded(self, email: str, address: str) -> None:
        """Forget the pair's count after a right password; the wider windows stay."""
        pair = next(iter(_keys(email, address)))
        self._local.forget(pair)
        try:
            await self._redis.delete(pair)
        except (RedisAwayError, RedisTimeoutError):
            return  # the count ends by itself


class LocalWindows:
    """Fixed windows in this process; the oldest are dropped beyond `MOST`."""

    MOST = 10_000

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def take(self, keys: dict[str, Limit]) -> float:
        """Seconds to wait, 0 after counting one in every window."""
        now = self._clock()
        state: dict[str, tuple[float, int]] = {}
        wait = 0.0
        for key, limit in keys.items():
            ends, count = self._windows.get(key, (0.0, 0))
            if ends <= now:
                ends, count = now + limit.window_s, 0
            if count >= limit.attempts:
                wait = max(wait, ends - now)
            state[key] = (ends, count)
        if wait > 0:
            return wait
        for key, (ends, count) in state.items():
            self._windows[key] = (ends, count + 1)
            self._windows.move_to_end(key)
        while len(self._windows) > self.MOST:
            self._windows.popitem(last=False)
        return 0.0

    def forget(self, key: str) -> None:
        self._windows.pop(key, None)


def _keys(email: str, address: str) -> dict[str, Limit]:
    """The pair's window first."""
    return {
        _key("pair", f"{email}\n{address}"): PAIR,
        _key("account", email): ACCOUNT,
        _key("address", address): ADDRESS,
    }


def _key(kind: str, subject: str) -> str:
    return f"tidegate:{{login}}:{kind}:{hashlib.sha256(subject.encode()).hexdigest()[:32]}"
