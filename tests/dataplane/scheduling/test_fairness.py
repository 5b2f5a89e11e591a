"""The bounds of the fair order, over whole runs, beside orders that must break them.

Source: Sheng et al., Fairness in Serving Large Language Models, section 4. U = max(w_p · longest prompt, w_q · M).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.scheduling.config import QueueOrder, SchedulerConfig
from dataplane.scheduling.queues import Queue, WaitingQueue, make_queue
from dataplane.scheduling.vtc import TokenCharges, VTCOrder
from tests.factories.fair_server import Arrival, FairServer, Watch, read_arrivals, steady

TRACE = Path(__file__).parents[4] / "shared" / "traces" / "vtc" / "real_trace.csv"
W_INPUT, W_OUTPUT = 1.0, 2.0


class LeastServedFirst(VTCOrder):
    """Without the lift: who was idle comes back with all the credit that others used up meanwhile."""

    def _floor(self) -> float:
        return 0.0


def least_served_first() -> Queue:
    return WaitingQueue(lambda: LeastServedFirst(TokenCharges(W_INPUT, W_INPUT, W_OUTPUT), {}))


def queue_of(order: QueueOrder, weights: dict[str, float] | None = None) -> Queue:
    return make_queue(SchedulerConfig(order=order), weights)


def unit(arrivals: list[Arrival], memory: int) -> float:
    return max(W_INPUT * max(arrival.prompt for arrival in arrivals), W_OUTPUT * memory)


def serve(
    queue: Queue, arrivals: list[Arrival], memory: int, *, until: float = float("inf"), **watch: Any
) -> FairServer:
    everyone = sorted({arrival.tenant for arrival in arrivals})
    server = FairServer(queue, memory, Watch(watch.pop("weights", {}), everyone, **watch))
    server.run(arrivals, until)
    assert server.idle_with_work == 0
    return server


def test_two_overloading_tenants_stay_within_the_bound_and_fcfs_drifts_apart_for_ever() -> None:
    ask = {"prompt": 256, "output": 256, "end": 600.0}
    arrivals = steady("90 rpm", 90, **ask) + steady("180 rpm", 180, **ask)
    memory = 10_000
    bound = 2 * unit(arrivals, memory)
    assert bound == 40_000

    fair = serve(queue_of(QueueOrder.VTC), arrivals, memory, until=600.0)
    assert fair.watch.apart < bound / 2
    assert fair.watch.service["90 rpm"] == pytest.approx(fair.watch.service["180 rpm"], rel=0.05)
    assert fair.watch.apart_by(600.0) < 1.2 * fair.watch.apart_by(200.0)

    first = serve(queue_of(QueueOrder.FCFS), arrivals, memory, until=600.0)
    assert first.watch.apart > 4 * bound
    assert first.watch.apart_by(600.0) / first.watch.apart_by(300.0) == pytest.approx(2.0, abs=0.15)
    # Fairness costs no throughput: neither order lets memory lie idle.
    assert fair.tokens == pytest.approx(first.tokens, rel=0.01)


def test_the_bound_is_met_by_the_worst_case_to_within_a_factor_of_two() -> None:
    """One tenant fills the memory a moment before another comes: no scheduler that never preempts does better."""
    memory = 2_000
    arrivals = [Arrival(0.0, "first", 1, 99) for _ in range(40)] + [Arrival(0.01, "second", 1, 99) for _ in range(40)]
    server = serve(queue_of(QueueOrder.VTC), arrivals, memory)
    assert 0.9 * W_OUTPUT * memory < server.watch.apart <= 2 * unit(arrivals, memory)


def test_service_is_what_is_shared_and_not_the_number_of_requests() -> None:
    reads = {"prompt": 400, "output": 50, "end": 300.0}
    writes = {"prompt": 20, "output": 200, "end": 300.0}
    arrivals = steady("reads", 300, **reads) + steady("writes", 300, **writes)
    server = serve(queue_of(QueueOrder.VTC), arrivals, 4_000, until=300.0)
    assert server.watch.service["reads"] == pytest.approx(server.watch.service["writes"], rel=0.05)
    assert server.watch.apart <= 2 * unit(arrivals, 4_000)


def test_weights_divide_the_service() -> None:
    weights = {"gold": 3.0}
    ask = {"prompt": 100, "output": 100, "end": 300.0}
    arrivals = steady("gold", 600, **ask) + steady("plain", 600, **ask)
    server = serve(queue_of(QueueOrder.VTC, weights), arrivals, 4_000, until=300.0, weights=weights)
    assert 3 * server.watch.service["gold"] / server.watch.service["plain"] == pytest.approx(3.0, rel=0.05)
    assert server.watch.apart <= 2 * unit(arrivals, 4_000)


def test_who_was_idle_gains_no_credit_and_takes_nobodys_turn() -> None:
    ask = {"prompt": 100, "output": 100}
    arrivals = (
        steady("idle", 600, **ask, end=2.0)
        + steady("busy", 600, **ask, end=400.0)
        + steady("idle", 600, **ask, start=300.0, end=400.0)
    )
    memory = 2_000
    bound = 2 * unit(arrivals, memory)
    assert serve(queue_of(QueueOrder.VTC), arrivals, memory, until=400.0).watch.apart <= bound
    assert serve(least_served_first(), arrivals, memory, until=400.0).watch.apart > 2 * bound


def test_one_that_asks_for_less_than_its_share_is_served_as_if_alone() -> None:
    ask = {"prompt": 100, "output": 100, "end": 300.0}
    modest = steady("modest", 20, **ask)
    arrivals = modest + steady("flood", 1200, **ask)
    fair = serve(queue_of(QueueOrder.VTC), arrivals, 4_000, until=330.0)
    assert fair.watch.service["modest"] == len(modest) * (100 * W_INPUT + 100 * W_OUTPUT)
    first = serve(queue_of(QueueOrder.FCFS), arrivals, 4_000, until=330.0)
    assert first.watch.service["modest"] < 0.5 * fair.watch.service["modest"]


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at=st.integers(0, 40).map(lambda step: step * 0.05),
        tenant=st.sampled_from(["a", "b", "c"]),
        prompt=st.integers(1, 40),
        output=st.integers(1, 20),
    ),
    min_size=5,
    max_size=60,
)


@settings(deadline=None)
@given(ARRIVALS, st.integers(60, 150), st.sampled_from([{}, {"a": 2.0}, {"b": 0.5, "c": 4.0}]))
def test_the_bounds_hold_for_any_arrivals(arrivals: list[Arrival], memory: int, weights: dict[str, float]) -> None:
    queue = queue_of(QueueOrder.VTC, weights)
    most = unit(arrivals, memory) / min([1.0, *weights.values()])
    everyone = sorted({arrival.tenant for arrival in arrivals})
    watch = CounterWatch(weights, everyone, queue=queue, most=most)
    server = FairServer(queue, memory, watch)
    server.run(arrivals)
    assert watch.apart <= 2 * most  # both wait
    assert watch.behind <= 4 * most  # one waits, the other need not
    assert server.idle_with_work == 0
    assert server.tokens == sum(arrival.prompt + arrival.output for arrival in arrivals)
    assert not queue._bands, "something is remembered of tenants that are gone"


class CounterWatch(Watch):
    """Looks at the counters too: of those that wait, none is more than U ahead of another (lemma 4.3)."""

    def __init__(self, weights: dict[str, float], everyone: list[str], *, queue: Queue, most: float) -> None:
        super().__init__(weights, everyone)
        self._queue = queue
        self._most = most
        self._level = 0.0

    def look(self, now: float, waiting: set[str]) -> None:
        super().look(now, waiting)
        if waiting:
            clients = self._queue._bands[0].order._clients
            counters = [clients[tenant].counter for tenant in waiting]
            assert max(counters) - min(counters) <= self._most
            assert min(counters) >= self._level, "the level that idle tenants are lifted to fell"
            self._level = min(counters)
        elif not self._queue._bands:
            self._level = 0.0


@pytest.mark.skipif(not TRACE.exists(), reason=f"the VTC trace is not beside the repository: {TRACE}")
def test_the_real_trace_of_27_tenants_stays_within_the_bound_and_fcfs_does_not_come_near() -> None:
    arrivals = read_arrivals(TRACE)
    assert len(arrivals) == 1_500 and len({arrival.tenant for arrival in arrivals}) == 27
    memory = 10_000
    fair = serve(queue_of(QueueOrder.VTC), arrivals, memory, pairs=False)
    first = serve(queue_of(QueueOrder.FCFS), arrivals, memory, pairs=False)
    assert fair.watch.apart <= 2 * unit(arrivals, memory)
    assert first.watch.apart > 5 * fair.watch.apart
    assert first.watch.apart_by(600.0) > 1.5 * first.watch.apart_by(300.0)
    assert fair.tokens / fair.now == pytest.approx(first.tokens / first.now, rel=0.02)
