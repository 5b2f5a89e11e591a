"""When to come back to a full room: the estimate, the places that are kept, and a herd that all comes back."""

from __future__ import annotations

import random

import pytest

from controlplane.admission.bands import Band, Lane
from controlplane.admission.places import Places
from controlplane.admission.policy import Queued, QueueLimits
from controlplane.admission.retry import GRACE_S, KEPT, LONGEST_S, Asker, Comebacks, wait_s
from controlplane.lab.retry.room import Constant, Visit, bursts, of_one_size, replay


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
    assert not room.admits(Asker("late"), 8, 10.0)
    due = 10.0 + room.refuse(Asker("late"), 10.0)
    assert not room.admits(Asker("other"), 7, due), "the last place is kept"
    assert room.admits(Asker("other"), 6, due), "one place is kept and no more"
    assert room.admits(Asker("late"), 7, due), "who was told to come now gets it"
    assert room.admits(Asker("other"), 7, due), "it is kept once"

    due = due + room.refuse(Asker("gone"), due)
    assert not room.admits(Asker("other"), 7, due)
    assert room.admits(Asker("other"), 7, due + GRACE_S), "who does not come loses it"


def test_who_comes_too_early_takes_no_kept_place(rng: random.Random) -> None:
    room = Comebacks(8, rng)
    room.ended(0.0)
    due = room.refuse(Asker("a"), 0.0)
    assert not room.admits(Asker("a"), 7, due - 0.01)
    assert room.admits(Asker("a"), 7, float(due))


def test_a_kept_place_is_not_taken_by_another_request_of_the_same_key(rng: random.Random) -> None:
    room = Comebacks(8, rng)
    room.ended(0.0)
    due = float(room.refuse(Asker("k", 700), 0.0))
    assert not room.admits(Asker("k", 699), 7, due + 0.01), "it is another request, though of the same key"
    assert room.admits(Asker("k", 700), 7, due + 0.02), "who was told to come has its place"
    assert not room.admits(Asker("k", 700), 8, due + 0.03)


def test_no_more_than_a_share_of_the_room_is_kept_whoever_stays_away(rng: random.Random) -> None:
    room = Comebacks(64, rng)
    for number in range(1000):
        assert 1 <= room.refuse(Asker(f"key-{number % 100}"), number / 1000) <= LONGEST_S
    for second in range(1, LONGEST_S + 2):
        assert room.admits(Asker("new"), 64 - 64 // KEPT - 1, float(second))
        assert not room.admits(Asker("new"), 64, float(second))
    assert room.kept == 0 or room.kept <= 64 // KEPT
    assert room.admits(Asker("new"), 63, 2.0 * LONGEST_S + GRACE_S), "all of it is forgotten in the end"


def test_one_key_cannot_fill_the_book(rng: random.Random) -> None:
    room = Comebacks(4, rng)
    for _ in range(100):
        room.ended(1.0)
    for size in range(1000):
        room.refuse(Asker("greedy", size), 1.0)
    assert room.refuse(Asker("modest"), 1.0) <= 2


@pytest.mark.parametrize(("places", "seconds"), [(16, 400), (64, 400), (256, 250)])
def test_f11_of_the_refused_nine_in_ten_pass_after_exactly_retry_after(
    rng: random.Random, places: int, seconds: float
) -> None:
    visits = bursts(rng, seconds, places, calm=0.6, rush=1.6)
    estimate = replay(visits, Comebacks(places, rng))
    assert estimate.refusals > 50
    assert estimate.share is not None
    assert estimate.share >= 0.9
    assert estimate.given_up == 0
    control = replay(visits, Constant(places))
    assert control.share is not None
    assert control.share < 0.6, "the control must not reach it"


def test_f11_how_large_the_room_is_does_not_matter_where_requests_can_be_told_apart(rng: random.Random) -> None:
    visits = bursts(rng, 125, 1024, calm=0.6, rush=1.6)
    told_apart, alike = replay(visits, Comebacks(1024, rng)), replay(of_one_size(visits), Comebacks(1024, rng))
    assert min(told_apart.refusals, alike.refusals) > 500
    assert told_apart.share is not None
    assert alike.share is not None
    assert told_apart.share >= 0.97
    assert alike.share < 0.9, "the control must not reach it"
    assert told_apart.waited_s / told_apart.refusals <= 1.1 * alike.waited_s / alike.refusals
    assert told_apart.given_up == 0


def test_f11_a_herd_refused_at_once_is_let_in_as_it_was_told(rng: random.Random) -> None:
    before = [Visit(number / 16, 1.0, Asker(f"key-{number % 7}", number)) for number in range(160)]
    herd = [Visit(10.0 + number / 1000, 1.0, Asker(f"key-{number % 50}", number)) for number in range(200)]
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

    def _one(self, asker: Asker) -> Queued:
        tenant = "t" if self._part else asker.key
        return Queued(request_id="r", tenant=tenant, lane=Lane.SHORT, band=Band.STANDARD, arrived_at=0.0)

    def admits(self, asker: Asker, in_flight: int, now: float) -> bool:
        one = self._one(asker)
        limits = self._places.limits_for(one.tenant, asker, Lane.SHORT, now)
        if in_flight >= (limits.tenant if self._part else limits.short):
            return False
        self._places.stood(one)
        self._standing.append(one)
        return True

    def ended(self, now: float) -> None:
        self._places.left(self._standing.pop(0), now)

    def refuse(self, asker: Asker, now: float) -> int:
        return self._places.refuse(self._code, self._one(asker).tenant, asker, Lane.SHORT, now)


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
