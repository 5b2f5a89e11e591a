"""Passwords: right and wrong, bounded, off the event loop, and the same work for nobody."""

from __future__ import annotations

import asyncio
import threading

import pytest
from argon2 import PasswordHasher

from controlplane.accounts.passwords import CONCURRENT, WAITING, Passwords
from controlplane.errors import RateLimitedError
from tests.factories.rows import cheap_passwords


class GatedHasher(PasswordHasher):
    """A real hasher that waits at a gate and counts who is inside."""

    def __init__(self) -> None:
        super().__init__(time_cost=1, memory_cost=8, parallelism=1)
        self.gate = threading.Event()
        self.gate.set()
        self.lock = threading.Lock()
        self.inside = self.most = self.verified = 0

    def hash(self, password: str | bytes, *, salt: bytes | None = None) -> str:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.gate.wait(30)
        with self.lock:
            self.inside -= 1
        return super().hash(password, salt=salt)

    def verify(self, hash: str | bytes, password: str | bytes) -> bool:  # type: ignore[override]
        self.verified += 1
        return super().verify(hash, password)


async def test_the_right_password_and_no_other() -> None:
    passwords = cheap_passwords()
    stored = await passwords.hash("correct horse")
    assert stored.startswith("$argon2id$")
    assert await passwords.verify(stored, "correct horse")
    assert not await passwords.verify(stored, "correct horsf")
    assert not await passwords.verify("not a hash", "correct horse")
    passwords.close()


async def test_an_unknown_user_costs_a_verification_too() -> None:
    hasher = GatedHasher()
    passwords = Passwords(hasher)
    assert not await passwords.verify(None, "anything")
    assert not await passwords.verify(None, "nobody has this password")
    assert hasher.verified == 2
    passwords.close()


async def test_hashing_is_bounded_and_leaves_the_event_loop_free() -> None:
    hasher = GatedHasher()
    hasher.gate.clear()
    passwords = Passwords(hasher)
    running = [asyncio.create_task(passwords.hash(f"p{n}")) for n in range(CONCURRENT + WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(RateLimitedError) as caught:
        await passwords.hash("one too many")
    assert caught.value.headers["retry-after"]
    hasher.gate.set()
    await asyncio.gather(*running)
    assert hasher.most <= CONCURRENT
    assert await passwords.hash("room again")
    passwords.close()


def test_weaker_parameters_are_noticed() -> None:
    weak = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash("p")
    strong = Passwords()
    assert strong.outdated(weak)
    strong.close()
