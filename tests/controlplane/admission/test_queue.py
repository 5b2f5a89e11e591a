"""The queue that gateways share: whose turn it is, what has room, and what is cleared when somebody falls silent."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.admission import queue as queue_module
from controlplane.admission.bands import FLOORS, Band, Lane, line_of
from controlplane.admission.queue import DEAD_S, IDLE_S, MAX_GRANTS, SharedQueue
from controlplane.admission.turn_messages import Arrival, Rules, Service, Turn, TurnAnswer

NOW = 1_000.0
STANDARD = line_of(Lane.SHORT, Band.STANDARD)
URGENT = line_of(Lane.SHORT, Band.URGENT)
BATCH = line_of(Lane.SHORT, Band.BATCH)
LONG = line_of(Lane.LONG, Band.STANDARD)
ONE = Rules(slots=1, tokens=10_000, long_slots=1, long_tokens=5_000, long_reserve=0)
WIDE = Rules(slots=100, tokens=10_000, long_slots=2, long_tokens=5_000, long_reserve=3_000)


class Talk:
    """Gateways that talk to one queue; a dispatch is seen at once."""

    def __init__(self, rules: Rules = ONE) -> None:
        self.queue = SharedQueue()
        self.rules = rules
        self.numbers: dict[str, int] = {}
        self.count = 0

    def arrival(self, tenant: str, line: int = STANDARD, **fields: object) -> Arrival:
        self.count += 1
        values: dict[str, object] = {"deadline_ms": self.count, "tokens": 100, "charge": 100.0}
        return Arrival(**{"request_id": f"{tenant}{self.count}", "line": line, "tenant": tenant, **values, **fields})  # type: ignore[arg-type]

    def say(self, gateway: str = "g", now: float = NOW, **news: object) -> TurnAnswer:
        self.numbers[gateway] = self.numbers.get(gateway, 0) + 1
        fresh = self.numbers[gateway] == 1
        return self.queue.turn(Turn(gateway, self.numbers[gateway], fresh, self.rules, **news), now)  # type: ignore[arg-type]

    def add(self, *arrivals: Arrival, gateway: str = "g", now: float = NOW) -> list[str]:
        answer = self.say(gateway, now, arrivals=arrivals)
        return self.see(answer, gateway, now)

    def see(self, answer: TurnAnswer, gateway: str = "g", now: float = NOW) -> list[str]:
        granted = [grant.request_id for grant in answer.grants]
        if granted:
            self.say(gateway, now, seen=tuple(granted))
        return granted

    def turns(self, count: int) -> str:
        """End what runs and see who is next, `count` times, by the first letter."""
        order = ""
        for _ in range(count):
            running = [name for name, entry in self.queue._requests.items() if entry.held]
            granted = self.see(self.say(ended=tuple(running)))
            order += "".join(name[0] for name in granted)
        return order


def test_tenants_alternate_however_much_one_of_them_asks() -> None:
    talk = Talk()
    talk.add(*(talk.arrival("a") for _ in range(20)), *(talk.arrival("b") for _ in range(3)))
    assert talk.turns(7) == "bababaa"


def test_a_tenant_of_thrice_the_weight_gets_thrice_the_turns() -> None:
    talk = Talk()
    talk.add(*(talk.arrival("a") for _ in range(60)), *(talk.arrival("b", charge=100 / 3) for _ in range(60)))
    assert talk.turns(60).count("b") == pytest.approx(45, abs=1)


def test_output_is_charged_as_it_is_produced() -> None:
    talk = Talk()
    talk.add(*(talk.arrival("a") for _ in range(9)), *(talk.arrival("b") for _ in range(9)))
    talk.say(served=(Service(STANDARD, "a", 250.0),))
    assert talk.turns(5) == "bbbba"


def test_idleness_earns_no_credit_and_debt_is_kept() -> None:
    talk = Talk()
    talk.add(talk.arrival("i"), *(talk.arrival("a") for _ in range(60)))
    talk.turns(30)
    talk.add(*(talk.arrival("i") for _ in range(20)))
    assert talk.turns(10).count("i") == 5
    talk.say(served=(Service(STANDARD, "d", 10**6),))
    talk.add(talk.arrival("d"))
    assert "d" not in talk.turns(20)


def test_of_one_tenant_the_earliest_deadline_goes_first_at_whatever_gateway() -> None:
    talk = Talk()
    talk.add(talk.arrival("x"))
    talk.add(talk.arrival("a", deadline_ms=30), talk.arrival("a", deadline_ms=10))
    talk.add(talk.arrival("a", deadline_ms=20), gateway="h")
    answer = talk.say(ended=("x1",))
    assert [grant.request_id for grant in answer.grants] == ["a3"]
    answer = talk.say(ended=("a3",))
    assert (answer.grants, answer.poked) == ((), ("h",))
    assert [grant.request_id for grant in talk.say("h").grants] == ["a4"]


def test_a_dispatch_is_repeated_until_it_was_seen_and_carries_its_tag() -> None:
    talk = Talk()
    first = talk.say(arrivals=(talk.arrival("a"), talk.arrival("a")))
    assert first.grants == talk.say().grants != ()
    assert talk.say(seen=("a1",)).grants == ()
    (second,) = talk.say(ended=("a1",)).grants
    assert (first.grants[0].tag, second.tag) == (0.0, 100.0)


def test_bands_go_before_one_another() -> None:
    talk = Talk(msgspec.structs.replace(ONE, floors=(0.0, 0.0, 0.0, 0.0)))
    talk.add(talk.arrival("x"))
    talk.add(*(talk.arrival("b", BATCH) for _ in range(3)), *(talk.arrival("u", URGENT) for _ in range(3)))
    assert talk.turns(6) == "uuubbb"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_f24_a_band_that_waits_gets_its_floor_less_two_requests(seed: int) -> None:
    rng = random.Random(seed)
    talk = Talk()
    lines = [line_of(Lane.SHORT, band) for band in Band]
    largest = 300
    for line in lines:
        talk.add(*(talk.arrival(f"{line}", line, tokens=rng.randint(1, largest)) for _ in range(300)))
    got = dict.fromkeys(lines, 0)
    for _ in range(250):
        running = [(name, entry.arrival) for name, entry in talk.queue._requests.items() if entry.held]
        for name, arrival in running:
            got[arrival.line] += arrival.tokens
            talk.see(talk.say(ended=(name,)))
    for band, line in zip(Band, lines, strict=True):
        others = sum(tokens for each, tokens in got.items() if each != line)
        assert got[line] >= FLOORS[band] * others - 2 * largest
    assert got[URGENT] > 0.7 * sum(got.values())


def test_dispatch_stops_at_the_first_that_has_no_room() -> None:
    talk = Talk(WIDE)
    granted = talk.add(
        talk.arrival("a", tokens=6_000), talk.arrival("a", tokens=5_000), talk.arrival("a", tokens=10)
    )  # fmt: skip
    assert granted == ["a1"]
    assert talk.see(talk.say(ended=("a1",))) == ["a2", "a3"]


def test_what_is_larger_than_the_pool_may_start_alone() -> None:
    talk = Talk(WIDE)
    assert talk.add(talk.arrival("a", tokens=50_000)) == ["a1"]
    nothing = Talk(msgspec.structs.replace(WIDE, slots=0))
    assert nothing.add(nothing.arrival("a")) == [], "a pool that holds nothing starts nothing"


def test_the_long_lane_is_bounded_and_keeps_room_for_its_turn() -> None:
    talk = Talk(WIDE)
    assert len(talk.add(*(talk.arrival("l", LONG, tokens=2_400) for _ in range(5)))) == 2
    busy = Talk(WIDE)
    assert len(busy.add(*(busy.arrival("s", tokens=1_000) for _ in range(20)))) == 10
    assert len(busy.add(busy.arrival("l", LONG, tokens=3_000), busy.arrival("l", LONG, tokens=100))) == 1
    assert busy.see(busy.say(ended=("l21",))) == ["l22"], "a lane that holds nothing may start one"


def test_short_prompts_leave_the_reserve_free_while_a_long_one_waits() -> None:
    talk = Talk(WIDE)
    talk.add(*(talk.arrival("s", tokens=1_000) for _ in range(20)))
    talk.add(talk.arrival("l", LONG, tokens=100), talk.arrival("l", LONG, tokens=2_900))
    ended = [name for name, entry in talk.queue._requests.items() if entry.held and name[0] == "s"]
    granted = [talk.see(talk.say(ended=(name,))) for name in ended[:4]]
    assert granted == [[], [], ["l22"], ["s11"]], "the reserve is filled before short ones go on"


def test_one_turn_is_bounded() -> None:
    talk = Talk(msgspec.structs.replace(WIDE, slots=1_000, tokens=10**9))
    assert len(talk.add(*(talk.arrival("a") for _ in range(100)))) == MAX_GRANTS


def test_a_full_queue_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_REQUESTS", 3)
    talk = Talk()
    answer = talk.say(arrivals=tuple(talk.arrival("a") for _ in range(5)))
    assert answer.refused == ("a4", "a5")


def test_a_repeated_message_changes_nothing() -> None:
    talk = Talk()
    message = Turn("g", 1, True, ONE, (talk.arrival("a"), talk.arrival("a")), (Service(STANDARD, "a", 7.0),))
    first, again = talk.queue.turn(message, NOW), talk.queue.turn(message, NOW)
    assert (first.grants, first.waiting) == (again.grants, again.waiting)
    assert talk.queue.served(STANDARD, "a") == 107.0


def test_f12_a_silent_gateway_leaves_and_what_it_held_is_free() -> None:
    talk = Talk()
    talk.add(talk.arrival("a"), talk.arrival("a"), gateway="dead")
    talk.add(talk.arrival("b"))
    late = NOW + DEAD_S + 1
    assert talk.say("g2", NOW + DEAD_S / 2).slots == 1
    answer = talk.say("g2", late)
    assert (answer.slots, answer.waiting, answer.gateways) == (0, 0, 1)
    assert talk.say("dead", late).lost, "it is told so when it speaks again"
    assert talk.say("g", late).lost


def test_who_runs_already_is_made_known_again_without_being_charged() -> None:
    talk = Talk()
    answer = talk.say(arrivals=(talk.arrival("a", held=True), talk.arrival("a")))
    assert (answer.slots, answer.waiting, answer.grants) == (1, 1, ())
    assert talk.queue.served(STANDARD, "a") == 0.0
    assert talk.see(talk.say(ended=("a1",))) == ["a2"]


def test_idle_tenants_are_forgotten_and_debtors_are_not() -> None:
    talk = Talk()
    talk.add(*(talk.arrival("a") for _ in range(3)), talk.arrival("idle"))
    talk.say(served=(Service(STANDARD, "debtor", 10**6),))
    talk.turns(6)
    talk.add(talk.arrival("z"))
    talk.turns(1)
    later = NOW
    while later < NOW + 2.5 * IDLE_S:
        later += DEAD_S / 2
        talk.say(now=later)
    assert {tenant for _, tenant in talk.queue.counters()} == {"debtor", "z"}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), max_size=40), st.data())
def test_everything_that_arrives_goes_once_or_is_given_up(asked: list[tuple[str, int]], data: st.DataObject) -> None:
    talk = Talk(msgspec.structs.replace(WIDE, slots=3, tokens=600))
    arrivals = [talk.arrival(tenant, tokens=tokens) for tenant, tokens in asked]
    granted = talk.add(*arrivals)
    gone: set[str] = set()
    while len(gone) < len(arrivals):
        left = [each.request_id for each in arrivals if each.request_id not in gone]
        name = data.draw(st.sampled_from(left))
        gone.add(name)
        granted += talk.see(talk.say(ended=(name,)))
    assert len(granted) == len(set(granted))
    last = talk.say()
    assert (last.slots, last.tokens, last.waiting) == (0, 0, 0)
