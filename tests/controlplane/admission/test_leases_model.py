"""Random histories of leases against a plain model: nothing negative, the holders' sum is what is held, repeats are
harmless, and a lost store is made whole by those who hold leases.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from controlplane.admission.answers import HELD_ON, Ended, Ending, Granted, Lease, Refused, Settled
from controlplane.admission.charges import Use
from tests.controlplane.admission.leasing import CONCURRENT, MONTHLY, TENANT, TPM, World, limit

LIMITS = [limit(TPM, 100), limit(CONCURRENT, 3), limit(MONTHLY, 600)]
TTL_S = 30
SPAN_S = 61


@dataclass
class Held:
    """What the model knows of one lease. `parts` are [second, units] of its rate, in order."""

    lease: Lease
    taken: int
    expires: float
    parts: list[list[int]]
    month: int
    over: bool = False


@dataclass
class Model:
    now: float = 0.0
    leases: dict[str, Held] = field(default_factory=dict)

    @property
    def second(self) -> int:
        return int(self.now)

    def used(self) -> list[int]:
        parts = [part for held in self.leases.values() for part in held.parts]
        return [
            sum(units for second, units in parts if second > self.second - SPAN_S),
            sum(not held.over and held.expires > self.now for held in self.leases.values()),
            sum(held.month for held in self.leases.values()),
        ]

    def fits(self, tokens: int, slots: int) -> bool:
        rate, held, month = self.used()
        return rate + tokens <= 100 and (not slots or held < 3) and (not tokens or month + tokens <= 600)

    def settle(self, held: Held, used: int) -> None:
        unused = held.month - used
        for part in reversed(held.parts):
            lowered = max(0, min(part[1], unused))
            part[1] -= lowered
            unused -= lowered
        if unused < 0:
            held.parts.append([self.second, -unused])
        held.month, held.over = used, True


class Histories(RuleBasedStateMachine):
    """Steps run in a loop of their own; `url` is set by the test."""

    url = ""
    ids = Bundle("ids")

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.model = Model()
        self.count = 0
        self.run(self._begin())

    async def _begin(self) -> None:
        self.redis = Redis.from_url(self.url)
        await self.redis.flushdb()
        self.world = await World(self.redis, ttl_s=TTL_S).start()
        self.other = self.world.gateway(ttl_s=TTL_S)
        await self.world.hydrate(LIMITS[2:])
        self.model.now = self.world.now

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.run(self.redis.aclose())
            self.runner.close()

    @rule(target=ids, tokens=st.integers(1, 60))
    def acquire(self, tokens: int) -> Any:
        self.count += 1
        name = f"lease-{self.count}"
        outcome = self.run(self.world.acquire(LIMITS, Use(input=tokens), name))
        if not self.model.fits(tokens, 1):
            assert isinstance(outcome, Refused)
            return multiple()
        assert isinstance(outcome, Granted), outcome
        lease = outcome.lease
        self.model.leases[name] = Held(
            lease, self.model.second, self.model.now + TTL_S, [[self.model.second, tokens]], tokens
        )
        return name

    @rule(name=ids)
    def acquire_again(self, name: str) -> None:
        held = self.model.leases[name]
        if held.over and held.expires + 60 <= self.model.now:
            return  # forgotten: an id is the holder's to use once
        outcome = self.run(self.world.acquire(LIMITS, Use(input=1), name))
        if held.over:
            assert outcome == Ended(why=Ending.SETTLED)
        elif held.expires <= self.model.now:
            assert outcome == Ended(why=Ending.EXPIRED)
        else:
            assert isinstance(outcome, Granted)
            assert outcome.repeated

    @rule(name=ids, tokens=st.integers(0, 30), repeats=st.integers(1, 2))
    def extend(self, name: str, tokens: int, repeats: int) -> None:
        held, model = self.model.leases[name], self.model
        if held.over:
            return
        slot = held.expires <= model.now
        more = self.world.charges(LIMITS, Use(requests=0, input=tokens))
        step = self.world.leases.next_step()
        fits = model.fits(tokens, slot) if tokens else not slot or model.used()[1] < 3
        for repeated in range(repeats):
            outcome = self.run(self.world.leases.extend(held.lease, more, step=step))
            assert isinstance(outcome, Granted) == fits, outcome
            assert not fits or outcome.repeated == bool(repeated)
        if fits:
            held.expires = max(held.expires, model.now + TTL_S)
            if tokens and held.parts[-1][0] == model.second:
                held.parts[-1][1] += tokens
            elif tokens:
                held.parts.append([model.second, tokens])
            held.month += tokens

    @rule(name=ids, used=st.integers(0, 90), elsewhere=st.booleans())
    def settle(self, name: str, used: int, elsewhere: bool) -> None:
        held = self.model.leases[name]
        outcome = self.run(self.world.leases.settle(held.lease, Use(input=used)))
        assert isinstance(outcome, Settled)
        if held.over:
            assert outcome.repeated
        else:
            assert outcome.late == (held.expires <= self.model.now)
            assert {one.units for one in outcome.overruns} == ({used - held.month} if used > held.month else set())
            self.model.settle(held, used)
        if elsewhere and held.lease.epoch == self.world.leases._holdings._epochs[TENANT]:
            self.run(self.other.settle(held.lease, Use(input=used)))

    @rule(seconds=st.floats(0.001, 45))
    def wait(self, seconds: float) -> None:
        self.run(self.world.advance(seconds))
        self.model.now = self.world.now

    @rule()
    def reassert(self) -> None:
        mine = [held for held in self.model.leases.values() if not held.over]
        told = self.run(self.world.leases.reassert([held.lease for held in mine]))
        for held, one in zip(mine, told, strict=True):
            assert one.state in HELD_ON
            held.expires = max(held.expires, self.model.now + TTL_S)

    @rule()
    def lose_the_store(self) -> None:
        """It comes back empty; the ledger knows what was settled, the holders what they hold."""
        self.run(self._lose())
        self.model.now = self.world.now
        self.reassert()
        settled = sum(held.month for held in self.model.leases.values() if held.over)
        self.run(self.world.hydrate(LIMITS[2:], settled))
        for held in self.model.leases.values():
            held.parts = [] if held.over else [[held.taken, held.month]]

    async def _lose(self) -> None:
        await self.redis.flushdb()
        await self.world.advance(0.001)

    @invariant()
    def balances(self) -> None:
        if not hasattr(self, "world"):
            return
        assert self.run(self.world.used(*LIMITS)) == self.model.used()
        assert all(value >= 0 for value in self.run(self._numbers()))

    async def _numbers(self) -> list[int]:
        found = await self.redis.hgetall(self.world.charges(LIMITS, Use())[0].key)
        found |= await self.redis.hgetall(self.world.charges(LIMITS, Use())[2].key)
        return [int(value) for value in found.values()]


def test_random_histories_agree_with_the_model(valkey: str) -> None:
    Histories.url = valkey
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Histories,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
