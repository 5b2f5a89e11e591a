"""Windows: replaced, never added up by the receiver, so nothing lost or repeated changes a total."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.protocol import WINDOW_SECONDS, Counters, Gauges, Histogram, Window, encode
from dataplane.windows import ACKNOWLEDGED_KEPT, PER_REPORT, Packet, WindowBook

LIMIT = 40


class Receiver:
    """The control plane's rule: a window replaces what is held for its start if its sequence is newer."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, Window]] = {}

    def take(self, sequence: int, windows: list[Window]) -> None:
        for window in windows:
            if window.start not in self.held or self.held[window.start][0] < sequence:
                self.held[window.start] = (sequence, window)

    def total(self, of: Callable[[Window], float]) -> float:
        return sum(of(window) for _, window in self.held.values())


class Sender:
    """A book with the sequence numbers a reporter gives, and what is still on its way."""

    def __init__(self) -> None:
        self.book = WindowBook(0.0, limit=LIMIT)
        self.sequence = 0
        self.late: list[tuple[int, list[Window]]] = []

    def send(self) -> tuple[int, list[Window], Packet]:
        packet = self.book.pack()
        self.sequence += 1
        # Over the wire and back: the receiver must not share objects with the sender.
        copy = msgspec.msgpack.decode(encode(packet.windows), type=list[Window])
        return self.sequence, copy, packet


def received(window: Window) -> int:
    return window.counters.service.received


def samples(window: Window) -> int:
    return window.gauge_samples


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.integers(1, 5)),
        st.tuples(st.just("sample"), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.sampled_from([1, 4, 11, 35])),
        st.tuples(st.just("outage"), st.integers(1, 2 * LIMIT)),
        st.tuples(st.sampled_from(["stored", "ack lost", "lost", "late"]), st.just(0)),
        st.tuples(st.just("arrive"), st.integers(0, 3)),
        st.tuples(st.just("resync"), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(EVENTS)
def test_totals_survive_lost_repeated_late_and_merged_windows(events: list[tuple[str, int]]) -> None:
    sender, receiver = Sender(), Receiver()
    now, counted, sampled = 0.0, 0, 0
    for what, value in events:
        if what == "count":
            sender.book.counters(now).service.received += value
            counted += value
        elif what == "sample":
            sender.book.sample(now, Gauges(running=value))
            sampled += 1
        elif what == "wait":
            now += value
        elif what == "outage":
            for _ in range(value):
                now += WINDOW_SECONDS
                sender.book.counters(now).service.received += 1
                counted += 1
                sender.send()
        elif what == "arrive":
            for sequence, windows in sender.late[:value]:
                receiver.take(sequence, windows)
            del sender.late[:value]
        elif what == "resync":
            sender.book.resync()
        else:
            sequence, windows, packet = sender.send()
            if what in ("stored", "ack lost"):
                receiver.take(sequence, windows)
            if what == "stored":
                sender.book.acknowledge(packet)
            if what == "late":
                sender.late.append((sequence, windows))
        assert sender.book.waiting <= LIMIT + ACKNOWLEDGED_KEPT + 1
        assert sender.book.totals().service.received == counted
    while sender.book.waiting:
        sequence, windows, packet = sender.send()
        receiver.take(sequence, windows)
        sender.book.acknowledge(packet)
    for sequence, windows in sender.late:
        receiver.take(sequence, windows)
    assert receiver.total(received) == counted
    assert receiver.total(samples) == sampled


def test_a_window_that_was_sent_keeps_its_start_when_others_are_merged() -> None:
    """Otherwise a lost acknowledgement would leave the old start at the receiver and count it twice."""
    sender = Sender()
    sender.book.counters(0.0).service.received += 1
    sent = {window.start for window in sender.send()[1]}
    for step in range(1, 3 * LIMIT):
        sender.book.counters(step * WINDOW_SECONDS).service.received += 1
        sent |= {window.start for window in sender.send()[1]}
    starts: set[int] = set()
    while sender.book.waiting:
        packet = sender.book.pack()
        starts |= set(packet.versions)
        sender.book.acknowledge(packet)
    assert sent <= starts
    assert len(starts) <= LIMIT + 1


def test_merging_gives_up_resolution_evenly_and_keeps_gauges() -> None:
    book = WindowBook(0.0, limit=LIMIT)
    for step in range(2 * LIMIT):
        book.sample(step * WINDOW_SECONDS, Gauges(running=step))
    windows: list[Window] = []
    while book.waiting:
        packet = book.pack()
        windows += packet.windows
        book.acknowledge(packet)
    assert sum(window.gauge_samples for window in windows) == 2 * LIMIT
    assert sum(window.gauge_sums["running"] for window in windows) == sum(range(2 * LIMIT))
    assert max(window.gauge_max["running"] for window in windows) == 2 * LIMIT - 1
    assert max(window.gauge_samples for window in windows) <= 4


def test_only_what_changed_is_sent_again() -> None:
    book = WindowBook(3.0)
    book.counters(3.0).service.received += 1
    first = book.pack()
    assert [window.start for window in first.windows] == [0]
    book.acknowledge(first)
    assert book.pack().windows == []
    book.counters(12.0).service.received += 1
    assert [window.start for window in book.pack().windows] == [10]


def test_a_change_after_packing_is_not_acknowledged_away() -> None:
    book = WindowBook(0.0)
    book.counters(1.0).service.received += 1
    packet = book.pack()
    book.counters(2.0).service.received += 1
    book.acknowledge(packet)
    again = book.pack()
    assert again.windows[0].counters.service.received == 2


def test_the_first_report_of_a_boot_and_one_after_a_resync_are_full() -> None:
    book = WindowBook(0.0)
    first = book.pack()
    assert first.full
    book.acknowledge(first)
    book.counters(1.0)
    assert not book.pack().full
    for step in range(1, 2 * PER_REPORT):
        book.counters(step * WINDOW_SECONDS)
        book.acknowledge(book.pack())
    book.resync()
    after = book.pack()
    assert after.full
    assert len(after.windows) == ACKNOWLEDGED_KEPT + 1
    book.acknowledge(after)
    assert not book.pack().full


def test_memory_stays_bounded_over_a_long_life() -> None:
    book = WindowBook(0.0)
    for step in range(1000):
        book.counters(step * WINDOW_SECONDS).service.received += 1
        book.acknowledge(book.pack())
    book.resync()
    assert book.waiting <= ACKNOWLEDGED_KEPT + 1
    assert book.totals().service.received == 1000


def test_a_clock_set_back_loses_nothing() -> None:
    book = WindowBook(100.0)
    book.counters(125.0).service.received += 1
    book.counters(90.0).service.received += 1
    windows = book.pack().windows
    assert [window.start for window in windows] == [100, 120]
    assert sum(received(window) for window in windows) == 2


def test_totals_include_histograms_of_every_window() -> None:
    book = WindowBook(0.0)
    for step in range(5):
        service = book.counters(step * WINDOW_SECONDS).service
        service.ttft = service.ttft or Histogram()
        service.ttft.record(0.5)
    totals: Counters = book.totals()
    assert totals.service.ttft is not None
    assert totals.service.ttft.count == 5


def test_a_limit_below_one_report_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        WindowBook(0.0, limit=PER_REPORT)
