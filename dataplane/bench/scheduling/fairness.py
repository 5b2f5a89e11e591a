"""What it gains to serve the least served client first, and what it costs.

Layer: service. One knob: `SchedulerConfig.order`. Source: Sheng et al., Fairness in Serving Large Language Models
(2024). Service is w_p a prompt token, at admission, and w_q an output token. Theorem 4.4: in any interval in which two
clients wait throughout, their service differs by 2·U at most, U = max(w_p · longest prompt, w_q · KV slots). It holds
where memory for every output is reserved at admission; the regime where it does not, because requests are preempted, is
among the rows, beside the same with the memory reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from dataplane.bench.report import Table
from dataplane.bench.scheduling.case import MANY, SchedulerCase, Section, pool
from dataplane.bench.simulated import simulate
from dataplane.bench.traces import TraceMissingError, TraceRow, Traces
from dataplane.bench.workload import percentile, request_of, requests_of_trace
from dataplane.protocol import RequestOutput
from dataplane.request import Request
from dataplane.scheduling.config import Capacity, QueueOrder, SchedulerConfig
from dataplane.scheduling.plan import Plan
from dataplane.scheduling.scheduler import Scheduler

INPUT, OUTPUT = 1.0, 2.0
"""w_p and w_q."""
SLOTS = 10_000
"""M: the KV slots of the paper's engine."""
ORDERS = (QueueOrder.FCFS, QueueOrder.VTC)
PER_MINUTE = {"a": 90.0, "b": 180.0}
LENGTH = 256
"""Tokens of each prompt and each output of the two clients."""
CROWDED_SLOTS = 2_000
CROWDED = {"prompt": 16, "output": 400}
"""Short prompts with long outputs: far more is admitted than memory has room for in the end."""
SPEED = 4.0
"""How many times as fast the 27 clients' trace is played, so that they wait; as it was, this machine keeps up."""


class ServiceWatch:
    """Measures what the theorem speaks of, from arrivals, plans and outputs alone.

    `gap` is the largest |ΔW_f − ΔW_g| over all intervals in which clients f and g both had a request waiting that had
    not run yet.
    """

    def __init__(self, clients: Iterable[str]) -> None:
        self._index = {name: index for index, name in enumerate(sorted(clients))}
        size = len(self._index)
        self._tenants: dict[str, int] = {}
        self._new: set[str] = set()
        self._waiting = np.zeros(size, dtype=np.int64)
        self._low = np.full((size, size), np.inf)
        self._high = -self._low
        self.service = np.zeros(size)
        self.gap = 0.0
        self.waited_s = 0.0
        """How long at least two clients waited."""
        self._last = 0.0

    def arriving(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests, each of which is known to wait as soon as the next one is asked for."""
        for request in requests:
            yield request
            client = self._tenants[request.request_id] = self._index[request.tenant]
            self._new.add(request.request_id)
            self._waiting[client] += 1

    def __call__(self, scheduler: Scheduler, plan: Plan, outputs: list[RequestOutput], now: float) -> None:
        for new in plan.new:
            if new.request_id in self._new:
                self._new.remove(new.request_id)
                client = self._tenants[new.request_id]
                self._waiting[client] -= 1
                self.service[client] += INPUT * new.prompt_len
        for output in outputs:
            self.service[self._tenants[output.request_id]] += OUTPUT * len(output.token_ids)
        waiting = self._waiting > 0
        both = waiting[:, None] & waiting[None, :]
        gaps = self.service[:, None] - self.service[None, :]
        self._low = np.where(both, np.minimum(self._low, gaps), np.inf)
        self._high = np.where(both, np.maximum(self._high, gaps), -np.inf)
        if np.count_nonzero(waiting) > 1:
            self.gap = max(self.gap, float((self._high - self._low)[both].max()))
            self.waited_s += now - self._last
        self._last = now


@dataclass(frozen=True, slots=True)
class Fairness:
    """One order over one workload. `gap` and `bound` are in service units; `tokens_per_s` counts prompts and outputs.

    `bound` is 2·U; `promised` says that the theorem holds for this run. `ttft_p50` is by client, in seconds.
    """

    gap: float
    bound: float
    promised: bool
    preemptions: int
    waited_s: float
    tokens_per_s: float
    seconds: float
    ttft_p50: dict[str, float]


def run_order(
    order: QueueOrder,
    requests: list[Request],
    case: SchedulerCase,
    *,
    slots: int = SLOTS,
    capacity: Capacity = Capacity.ON_DEMAND,
) -> Fairness:
    """Serve `requests`, which come in order of arrival, to the end."""
    config = SchedulerConfig(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_waiting=MANY,
        order=order,
        input_charge=INPUT,
        output_charge=OUTPUT,
        capacity=capacity,
    )
    watch = ServiceWatch({request.tenant for request in requests})
    outcome = simulate(watch.arriving(requests), config, pool(slots), cost=case.cost, watch=watch)
    firsts: dict[str, list[float]] = {}
    for request in requests:
        assert request.first_token is not None
        firsts.setdefault(request.tenant, []).append(request.first_token - request.queued)
    prompts = sum(request.prompt_len for request in requests)
    return Fairness(
        gap=watch.gap,
        bound=2 * max(INPUT * max(request.prompt_len for request in requests), OUTPUT * slots),
        promised=order is QueueOrder.VTC and capacity is Capacity.RESERVE_MAX,
        preemptions=outcome.preemptions,
        waited_s=watch.waited_s,
        tokens_per_s=(prompts + outcome.output_tokens) / outcome.seconds,
        seconds=outcome.seconds,
        ttft_p50={client: percentile(found, 0.5) for client, found in sorted(firsts.items())},
    )


def steady(
    per_minute: Mapping[str, float], minutes: float, *, prompt: int = LENGTH, output: int = LENGTH
) -> list[Request]:
    """Clients that each send at a steady rate."""
    moments = sorted(
        (60 * number / rate, client, number)
        for client, rate in per_minute.items()
        for number in range(int(rate * minutes))
    )
    return [request_of(f"{client}{number}", [0] * prompt, output, at, client) for at, client, number in moments]


def fairness(case: SchedulerCase, traces: Traces) -> Section:
    """Results: workload → order → Fairness. Without the trace, the made-up clients alone."""
    minutes = case.size(4, 1)
    workloads: dict[str, Callable[[], list[Request]]] = {
        "two clients, 90 and 180 rpm": lambda: steady(PER_MINUTE, minutes),
        "two clients, 45 and 90 rpm": lambda: steady({name: rate / 2 for name, rate in PER_MINUTE.items()}, minutes),
        "one client, 270 rpm": lambda: steady({"a": 270.0}, minutes),
    }
    note = ""
    try:
        rows = traces.read("vtc", case.size(1500, 400)).rows
        for speed in (SPEED, 1.0):
            name = f"{len({row.client for row in rows})} clients (vtc), {speed:g} times as fast"
            workloads[name] = partial(_played, rows, speed)
    except TraceMissingError as error:
        note = f" The clients of the VTC trace are left out: {error}."
    results = {
        name: {order.value: run_order(order, make(), case) for order in ORDERS} for name, make in workloads.items()
    }
    crowd = {name: rate / 2 for name, rate in PER_MINUTE.items()}
    for capacity in Capacity:
        results[f"two clients, {CROWDED_SLOTS} slots, {capacity}"] = {
            order.value: run_order(order, steady(crowd, 1.0, **CROWDED), case, slots=CROWDED_SLOTS, capacity=capacity)
            for order in ORDERS
        }
    return Section(
        [_table(results, note)],
        {name: {order: asdict(found) for order, found in by_order.items()} for name, by_order in results.items()},
    )


def _played(rows: Sequence[TraceRow], speed: float) -> list[Request]:
    return list(requests_of_trace(rows, speed))


def _table(results: dict[str, dict[str, Fairness]], note: str) -> Table:
    rows = []
    for name, by_order in results.items():
        base = by_order[QueueOrder.FCFS].tokens_per_s
        for order, each in by_order.items():
            rows.append(
                (
                    f"{name}: {order}",
                    f"{each.gap:,.0f}",
                    f"{each.bound:,.0f} ({'promised' if each.promised else 'not promised'})",
                    f"{each.preemptions:,}",
                    f"{each.waited_s:.0f} of {each.seconds:.0f}",
                    f"{each.tokens_per_s:,.0f} ({each.tokens_per_s / base - 1:+.2%})",
                    f"{min(each.ttft_p50.values()):.1f} / {max(each.ttft_p50.values()):.1f}",
                )
            )
    return Table(
        f"Fairness (VTC), {SLOTS} slots where not named: largest difference in service between clients that both wait",
        (
            "clients: order",
            "gap",
            "2·U",
            "preempted",
            "both wait, s",
            "tokens/s (price)",
            "client's median TTFT s, best / worst",
        ),
        tuple(rows),
        "FCFS lets the gap grow for as long as both wait. The theorem promises VTC 2·U where memory for every output "
        "is reserved at admission. On demand, requests that are preempted come back before what never ran, whoever "
        "asked for them. Controls: where the machine keeps up nobody waits, and with one client there is nobody to be "
        "fair to: the order changes nothing." + note,
    )
