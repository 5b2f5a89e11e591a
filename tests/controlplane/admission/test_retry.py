"""When to come back to a full room: the estimate, the places that are kept, and a herd that all comes back."""

from __future__ import annotations

import random

import pytest

from controlplane.admission.bands import Band, Lane
from controlplane.admission.places import Places
from controlplane.admission.policy import Queued, QueueLimits
from controlplane.admission.retry import GRACE_S, KEPT, LONGEST_S, Comebacks, wait_s
from controlplane.lab.retry.room import Constant, Visit, bursts, replay


def test_the_wait_is_behind_the_line_and_behind_who_was_sent_away_before() -> None:
    assert wait_s(0.0, 10.0, []) == 1
    assert wait_s(0.0, 10.0, [], waiting=39) == 4
    crowded = sorted([1.0] * 50 + [2.0] * 50)
    assert wait_s(0.0, 10.0, crowded) == 3
    assert wait_s(0.0, None, []) == 1
    assert wait_s(0.0, 1.0, [float(second) for second in range(LONGEST_S + 1) for _ in range(9)]) is None


def test_a_place_is_kept_for_who_is_due_and_no_longer_than_the_grace(rng: random.Random) -> None:
    room = Comebacks(8, rng)
    for at in range(100):
        room.ended(at / 10)
    assert not room.admits("late", 8, 10.0)
    due = 10.0 + room.refuse("late", 10.0)
    assert not room.admits("other", 7, due), "the last place is kept"
    assert room.admits("other", 6, due), "one place is kept and no more"
    assert room.admits("late", 7, due), "who was told to come now gets it"
    assert room.admits("other", 7, due), "it is kept once"

    due = due + room.refuse("gone", due)
    assert not room.admits("other", 7, due)
    assert room.admits("other", 7, due + GRACE_S), "who does not come loses it"


def test_who_comes_too_early_takes_no_kept_place(rng: random.Random) -> None:
    room = Comebacks(8, rng)
    room.ended(0.0)
    due = room.refuse("a", 0.0)
    assert not room.admits("a", 7, due - 0.01)
    assert room.admits("a", 7, float(due))


def test_no_more_than_a_share_of_the_room_is_kept_whoever_stays_away(rng: random.Random) -> None:
    room = Comebacks(64, rng)
    for number in range(1000):
        assert 1 <= room.refuse(f"key-{number % 100}", number / 1000) <= LONGEST_S
    for second in range(1, LONGEST_S + 2):
        assert room.admits("new", 64 - 64 // KEPT - 1, float(second))
        assert not room.admits("new", 64, float(second))
    assert room.kept == 0 or room.kept <= 64 // KEPT
    assert room.admits("new", 63, 2.0 * LONGEST_S + GRACE_S), "all of it is forgotten in the end"


def test_one_key_cannot_fill_the_book(rng: random.Random) -> None:
    room = Comebacks(4, rng)
    for _ in range(100):
        room.ended(1.0)
    for _ in range(1000):
        room.refuse("greedy", 1.0)
    assert room.refuse("modest", 1.0) <= 2


@pytest.mark.parametrize("places", [16, 64])
def test_f11_of_the_refused_nine_in_ten_pass_after_exactly_retry_after(rng: random.Random, places: int) -> None:
    visits = bursts(rng, 400, places, calm=0.6, rush=1.6)
    estimate = replay(visits, Comebacks(places, rng))
    assert estimate.refusals > 50
    assert estimate.share is not None
    assert estimate.share >= 0.9
    assert estimate.given_up == 0
    control = replay(visits, Constant(places))
    assert control.share is not None
    assert control.share < 0.6, "the control must not reach it"


def test_f11_a_herd_refused_at_once_is_let_in_as_it_was_told(rng: random.Random) -> None:
    before = [Visit(number / 16, 1.0, f"key-{number % 7}") for number in range(160)]
    herd = [Visit(10.0 + number / 1000, 1.0, f"key-{number % 50}") for number in range(200)]
    outcome = replay(before + herd, Comebacks(32, rng))
    assert outcome.refused_visits > 150
    assert outcome.share is not None
    assert outcome.share >= 0.9
    assert outcome.given_up == 0
    assert outcome.most_together <= 32


class InLine:
    """A line whose only tenant's part or lane is the room."""

    def __init__(self, places: int, rng: random.Random, *, part: bool) -> None:
        limits = QueueLimits(short=10_000 if part else places, tenant=places if part else 10_000)
        self._code = "tenant_queue_full" if part else "queue_full"
        self._limits, self._part = limits, part
        self._places = Places(limits, rng)
        self._standing: list[Queued] = []

    def _one(self, key: str) -> Queued:
        tenant = "t" if self._part else key
        return Queued(request_id="r", tenant=tenant, lane=Lane.SHORT, band=Band.STANDARD, arrived_at=0.0)

    def admits(self, key: str, in_flight: int, now: float) -> bool:
        one = self._one(key)
        limits = self._places.limits_for(one.tenant, key, Lane.SHORT, now)
        if in_flight >= (limits.tenant if self._part else limits.short):
            return False
        self._places.stood(one)
        self._standing.append(one)
        return True

    def ended(self, now: float) -> None:
        self._places.left(self._standing.pop(0), now)

    def refuse(self, key: str, now: float) -> int:
        return self._places.refuse(self._code, self._one(key).tenant, key, Lane.SHORT, now)


@pytest.mark.parametrize("part", [False, True])
def test_f11_of_those_a_full_line_refused_nine_in_ten_pass_after_exactly_retry_after(
    rng: random.Random, part: bool
) -> None:
    visits = bursts(rng, 400, 32, calm=0.6, rush=1.6)
    outcome = replay(visits, InLine(32, rng, part=part))
    assert outcome.refusals > 50
    assert outcome.share is not None
    assert outcome.share >= 0.9
    assert outcome.given_up == 0
