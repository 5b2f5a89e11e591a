"""A gateway's part in the shared queue: what it says, whatever gets lost on the way, and what the pool has room for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.admission.bands import Band, Lane
from controlplane.admission.dispatch import Credit, Dispatcher, Waiting, credit_of, part_of, rules_of
from controlplane.admission.queue import DEAD_S, SharedQueue
from controlplane.admission.turn_messages import Rules, TurnAnswer
from dataplane.protocol import CoreReady, Gauges
from dataplane.scheduling.vtc import TokenCharges

RULES = Rules(slots=3, tokens=10_000, long_slots=1, long_tokens=5_000, long_reserve=0)


def waiting(name: str, tenant: str = "a", **fields: object) -> Waiting:
    values: dict[str, object] = {
        "lane": Lane.SHORT, "band": Band.STANDARD, "deadline_at": 5.0, "uncached": 80, "cached": 20, "output": 50,
    }  # fmt: skip
    return Waiting(**{"request_id": name, "tenant": tenant, **values, **fields})  # type: ignore[arg-type]


def ready(**fields: object) -> CoreReady:
    values: dict[str, object] = {"boot_epoch": 1, "model": "m", "max_model_len": 2048, "block_size": 16}
    return CoreReady(**{**values, "total_blocks": 1000, "max_num_seqs": 64, **fields})  # type: ignore[arg-type]


def test_a_replicas_credit_is_its_own_word_or_what_it_runs_at_once_and_a_little() -> None:
    assert credit_of(ready(), Gauges()) == Credit(72, 16_000, 2048)
    assert credit_of(ready(), Gauges(credits=10)) == Credit(10, 16_000, 2048)
    assert credit_of(ready(total_blocks=0), Gauges(credits=2)) == Credit(2, 4096, 2048), "an engine that shows no KV"
    assert credit_of(None, Gauges(credits=5)) is None
    assert credit_of(ready(max_model_len=0), Gauges()) is None


def test_the_pools_rules_are_the_sum_of_its_replicas() -> None:
    rules = rules_of([Credit(64, 16_000, 2048)] * 8)
    assert (rules.slots, rules.tokens, rules.long_slots, rules.long_tokens) == (512, 128_000, 2, 32_000)
    assert rules_of([Credit(4, 2048, 2048)]).long_tokens == 2048
    assert rules_of([]).slots == 0
    with pytest.raises(ValueError, match="floors must be 4 shares"):
        rules_of([], floors=(0.5, 0.5, 0.0, 0.0))


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(0, 500))
def test_the_parts_of_all_gateways_are_no_more_than_the_pool_but_for_one_request_each(
    gateways: int, slots: int
) -> None:
    part = part_of(rules_of([Credit(slots, slots * 100, 50)]), gateways)
    assert part.slots * gateways <= max(slots, gateways if slots else 0)
    assert part.tokens * gateways <= slots * 100


def test_what_it_says_of_a_request() -> None:
    dispatcher = Dispatcher("g", TokenCharges(1.0, 0.25, 2.0), {"a": 2.0})
    dispatcher.add(waiting("r", deadline_at=1.5))
    (arrival,) = dispatcher.message(RULES).arrivals
    assert (arrival.tokens, arrival.charge, arrival.deadline_ms, arrival.held) == (150, 42.5, 1500, False)
    queue = SharedQueue()
    (grant,) = dispatcher.answered(queue.turn(dispatcher.message(RULES), 1.0)).grants
    assert grant.request_id == "r"
    dispatcher.produced("r", 10)
    assert dispatcher.unsent == 10.0
    dispatcher.end("r")
    message = dispatcher.message(RULES)
    assert ([each.charge for each in message.served], message.ended) == ([10.0], ("r",))
    dispatcher.answered(queue.turn(message, 1.0))
    assert not dispatcher.news
    assert queue.served(arrival.line, "a") == 52.5


def test_a_request_that_ends_before_it_was_told_is_never_told() -> None:
    dispatcher = Dispatcher("g", TokenCharges())
    dispatcher.add(waiting("r"))
    dispatcher.end("r")
    assert not dispatcher.news


def test_a_request_that_ends_while_it_is_being_told_is_told_to_have_ended() -> None:
    dispatcher, queue = Dispatcher("g", TokenCharges()), SharedQueue()
    dispatcher.add(waiting("r"))
    answer = queue.turn(dispatcher.message(RULES), 1.0)
    dispatcher.end("r")
    assert dispatcher.answered(answer).grants == []
    assert dispatcher.message(RULES).ended == ("r",)
    assert queue.turn(dispatcher.message(RULES), 1.0).slots == 0


def test_a_request_that_went_at_once_runs_on_where_the_queue_has_no_room_to_note_it() -> None:
    dispatcher = Dispatcher("g", TokenCharges())
    dispatcher.begin(waiting("runs"))
    dispatcher.add(waiting("waits"))
    dispatcher.message(RULES)
    full = TurnAnswer(1, 1.0, False, refused=("runs", "waits"))
    assert dispatcher.answered(full).refused == ["waits"]
    dispatcher.produced("runs", 3)
    dispatcher.counted("runs", 80, 20)
    dispatcher.end("runs")
    assert len(dispatcher) == 0
    assert dispatcher.message(RULES).ended == ("runs",)


def test_an_emptied_queue_is_told_everything_again() -> None:
    dispatcher = Dispatcher("g", TokenCharges())
    for name in "abcde":
        dispatcher.add(waiting(name))
    dispatcher.answered(SharedQueue().turn(dispatcher.message(RULES), 1.0))
    dispatcher.produced("a", 5)
    emptied = SharedQueue()
    assert dispatcher.answered(emptied.turn(dispatcher.message(RULES), 2.0)).grants == []
    assert dispatcher.gateway == "g#2"
    assert dispatcher.unsent == 10.0, "what was taken out of the lost message is still to be told"
    answer = emptied.turn(dispatcher.message(RULES), 2.0)
    assert (answer.slots, answer.waiting) == (3, 2)
    assert [each.request_id for each in dispatcher.waiting()] == ["d", "e"]


def test_f12_who_is_told_anew_under_a_new_name_keeps_its_place_and_what_it_holds() -> None:
    """A short silence of the queue: what it knows under the old name is taken over, not kept until that name dies."""
    queue, rules = SharedQueue(), Rules(slots=1, tokens=10_000, long_slots=1, long_tokens=5_000, long_reserve=0)
    dispatcher = Dispatcher("g", TokenCharges())
    for name in ("runs", "waits"):
        dispatcher.add(waiting(name))
    dispatcher.answered(queue.turn(dispatcher.message(rules), 1.0))
    dispatcher.move()
    answer = queue.turn(dispatcher.message(rules), 1.5)
    assert (answer.slots, answer.waiting) == (1, 1)
    dispatcher.answered(answer)
    for second in range(2, 2 + int(DEAD_S) * 2):  # the old name is forgotten, and nothing with it
        answer = queue.turn(dispatcher.message(rules), float(second))
        dispatcher.answered(answer)
    assert (answer.slots, answer.waiting, answer.gateways) == (1, 1, 1)
    dispatcher.end("runs")
    grants = dispatcher.answered(queue.turn(dispatcher.message(rules), 30.0)).grants
    assert [grant.request_id for grant in grants] == ["waits"]
    dispatcher.end("waits")
    answer = queue.turn(dispatcher.message(rules), 30.0)
    assert (answer.slots, answer.waiting, answer.tokens) == (0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_f12_whatever_is_lost_or_repeated_nothing_leaks_and_nobody_goes_twice(seed: int) -> None:
    """Three gateways; calls and answers get lost, the queue is emptied, gateways pause; in the end all is free."""
    rng = random.Random(seed)
    queue, now = SharedQueue(), 100.0
    gateways = [Dispatcher(f"g{index}", TokenCharges()) for index in range(3)]
    live: list[dict[str, bool]] = [{} for _ in gateways]
    count = 0
    granted: list[str] = []

    def speak(index: int, *, reliable: bool) -> None:
        gateway = gateways[index]
        message = gateway.message(RULES)
        if not reliable and rng.random() < 0.15:
            return  # the call got lost
        answer = queue.turn(message, now)
        if not reliable and rng.random() < 0.15:
            return  # the answer got lost
        for grant in gateway.answered(answer).grants:
            granted.append(grant.request_id)
            live[index][grant.request_id] = True

    for _ in range(120):
        index = rng.randrange(3)
        now += rng.choice((0.0, 0.1, 0.1, DEAD_S / 2))
        action = rng.random()
        if action < 0.4:
            count += 1
            live[index][f"r{count}"] = False
            gateways[index].add(waiting(f"r{count}", rng.choice("ab")))
        elif action < 0.6 and live[index]:
            name = rng.choice(sorted(live[index]))
            del live[index][name]
            gateways[index].end(name)
        elif action < 0.62:
            queue = SharedQueue()
        speak(index, reliable=False)
    for index, gateway in enumerate(gateways):
        for name in live[index]:
            gateway.end(name)
        live[index] = {}
        for _ in range(3):
            speak(index, reliable=True)
    last = queue.turn(gateways[0].message(RULES), now + 2 * DEAD_S)  # old names are cleared by now
    if last.lost:
        gateways[0].answered(last)
        last = queue.turn(gateways[0].message(RULES), now + 2 * DEAD_S)
    assert (last.slots, last.tokens, last.waiting) == (0, 0, 0)
    assert len(granted) == len(set(granted))
    assert all(not gateway.news for gateway in gateways[1:])
