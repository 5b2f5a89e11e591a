"""Leases in the scripts' own words: requests in, answers out.

Layer: service. Pure. Requests and answers are msgpack; times are whole microseconds there and seconds here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from controlplane.admission.answers import (
    Basis,
    Cold,
    ColdCounter,
    DoubtedCounter,
    Ended,
    Ending,
    Granted,
    Holding,
    Lease,
    OutsideWindows,
    Overrun,
    Reasserted,
    Refusal,
    Refused,
    Reserved,
    Settled,
    Standing,
    refused,
    soft_warnings,
    standing_of,
)
from controlplane.admission.charges import Charge, Counter, Use, tenant_key

SECOND_US = 1_000_000
NEVER = -1
FIRST_COUNTER = 4
"""The place of the first counter in KEYS, counted from 1."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Any]).decode


def micros(seconds: float) -> int:
    return round(seconds * SECOND_US)


def keys(tenant_id: str, counters: Sequence[str]) -> list[str]:
    """KEYS of every script: the tenant's own three, then the counters."""
    return [*_own_keys(tenant_id), *counters]


@lru_cache(maxsize=4096)
def _own_keys(tenant_id: str) -> tuple[str, ...]:
    return tuple(tenant_key(tenant_id, name) for name in ("meta", "leases", "order"))


def charge_words(charges: Sequence[Charge]) -> list[list[int]]:
    return [
        [int(charge.counter), charge.amount, -1 if charge.hard is None else charge.hard, *charge.window]
        for charge in charges
    ]


def use_words(lease: Lease, use: Use) -> list[list[int]]:
    at = lease.taken_at
    return [[int(charge.counter), use.units(charge.kind), charge.start(at)] for charge in lease.charges]


def held_words(lease: Lease, places: dict[str, int]) -> list[Any]:
    """A lease that is said to be still held; `places` gives each counter's place in KEYS."""
    charges = [
        [places[charge.key], charge.counter.value, charge.amount, _place(charge, lease.taken_at)]
        for charge in lease.charges
    ]
    times = [micros(lease.expires_at), micros(lease.taken_at), micros(lease.ttl_s)]
    return [lease.lease_id, lease.fence, lease.epoch, *times, charges]


def _place(charge: Charge, at: float) -> int:
    return int(at) if charge.counter is Counter.RATE else charge.start(at)


def standings(charges: Sequence[Charge], words: list[list[int]]) -> tuple[Standing, ...]:
    return tuple(
        [standing_of(charge, used, reset / SECOND_US) for charge, (used, reset, _) in zip(charges, words, strict=True)]
    )


def doubted(charges: Sequence[Charge], words: list[list[int]], now: int) -> tuple[DoubtedCounter, ...]:
    """Those of `charges` whose counter is in doubt; `now` in microseconds."""
    return tuple(
        DoubtedCounter(charge=charge, start=charge.start(now / SECOND_US), since=since / SECOND_US)
        for charge, (_, _, since) in zip(charges, words, strict=True)
        if since
    )


def obstacle(tenant_id: str, charges: Sequence[Charge], answer: list[Any]) -> Refused | Cold | OutsideWindows | Ended:
    """What any script that takes says when it has taken nothing."""
    match answer:
        case ["refused", _, now, refusals, words]:
            stands = standings(charges, words)
            found = (_refusal(charges[i], stands[i].used, wait) for i, wait in refusals)
            return refused(found, stands, doubted(charges, words, now))
        case ["cold", _, now, cold]:
            counters = tuple(ColdCounter(charge=charges[i], start=start, stop=stop) for i, start, stop in cold)
            return Cold(tenant_id=tenant_id, counters=counters, now=now / SECOND_US)
        case ["outside", now]:
            return OutsideWindows(now=now / SECOND_US)
        case ["ended", why]:
            return Ended(why=Ending(why))
        case _:
            raise ValueError(f"a lease script answered {answer[:1]!r}")


def _refusal(charge: Charge, used: int, wait: int) -> Refusal:
    return Refusal(
        quota_id=charge.quota_id,
        level=charge.level,
        kind=charge.kind,
        limit=charge.hard or 0,
        used=used,
        amount=charge.amount,
        retry_after_s=None if wait == NEVER else wait / SECOND_US,
        exact=charge.counter is not Counter.HELD or wait == NEVER,
    )


def granted(lease: Lease, asked: Sequence[Charge], answer: list[Any]) -> Granted:
    """`lease` as it should be, but for what the store decides."""
    _, epoch, now, repeated, fence, taken, expires, words = answer
    lease = msgspec.structs.replace(
        lease,
        basis=Basis.STORE,
        fence=fence,
        epoch=epoch,
        taken_at=taken / SECOND_US,
        expires_at=expires / SECOND_US,
    )
    stands = standings(asked, words)
    return Granted(
        lease=lease,
        standings=stands,
        warnings=soft_warnings(asked, [one.used for one in stands]),
        repeated=bool(repeated),
        doubted=doubted(asked, words, now) if any(since for _, _, since in words) else (),
    )


def settled(lease: Lease, answer: list[Any]) -> Settled | Ended:
    match answer:
        case ["settled", _, repeated, late, units]:
            overruns = tuple(
                Overrun(quota_id=charge.quota_id, kind=charge.kind, units=over)
                for charge, over in zip(lease.charges, units, strict=False)
                if over
            )
            return Settled(overruns=overruns, repeated=bool(repeated), late=bool(late))
        case ["ended", why]:
            return Ended(why=Ending(why))
        case _:
            raise ValueError(f"a lease script answered {answer[:1]!r}")


def reserved(answer: list[Any]) -> Reserved:
    _, _, _, leases, units = answer
    return Reserved(
        leases=leases, units={(key, place): held for key, place, held in units} if units is not False else None
    )


def reasserted(lease: Lease, epoch: int, words: list[Any]) -> Reasserted:
    state, fence, expires = Holding(words[0]), words[1], words[2]
    if state in {Holding.KEPT, Holding.REVIVED, Holding.RECREATED}:
        lease = msgspec.structs.replace(
            lease, basis=Basis.STORE, fence=fence, epoch=epoch, expires_at=expires / SECOND_US
        )
    return Reasserted(lease=lease, state=state)
