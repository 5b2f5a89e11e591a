"""A server that admits from a queue while its memory lasts, and a watch over who was served how much meanwhile.

One step generates a token for everyone that runs. A request takes the memory of its prompt and its answer from
admission to end, so that what runs never holds more than `memory` tokens: the M of the fairness bounds.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dataplane.request import Request, RequestState
from dataplane.scheduling.queues import Queue
from tests.factories.requests import make_request

STEP_S, STEP_S_PER_ROW, STEP_S_PER_PREFILL_TOKEN = 0.03, 0.0005, 0.0003  # near an A10G with a 7B model


@dataclass(frozen=True)
class Arrival:
    at: float
    tenant: str
    prompt: int
    output: int


def steady(
    tenant: str, per_minute: float, *, prompt: int, output: int, start: float = 0.0, end: float
) -> list[Arrival]:
    """Equal requests at equal distances."""
    count = int((end - start) * per_minute / 60)
    return [Arrival(start + index * 60 / per_minute, tenant, prompt, output) for index in range(count)]


def read_arrivals(path: Path) -> list[Arrival]:
    """The real trace of the VTC artifact: req_time_s, client, prompt_len, output_len."""
    with path.open(newline="") as lines:
        return [
            Arrival(float(row["req_time_s"]), row["client"], int(row["prompt_len"]), int(row["output_len"]))
            for row in csv.DictReader(lines)
        ]


@dataclass
class Watch:
    """Service by tenant, and how far it came apart while tenants waited without a break.

    `apart` is the greatest difference between two that both waited over any interval; `behind` is how much one that
    waited got less than any other, waiting or not. Service is divided by weight.
    """

    weights: Mapping[str, float]
    everyone: list[str]
    pairs: bool = True
    service: dict[str, float] = field(default_factory=dict)
    apart: float = 0.0
    behind: float = 0.0
    apart_at: list[tuple[float, float]] = field(default_factory=list)
    _ranges: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    _lows: dict[tuple[str, str], float] = field(default_factory=dict)

    def charge(self, tenant: str, amount: float) -> None:
        self.service[tenant] = self.service.get(tenant, 0.0) + amount / self.weights.get(tenant, 1.0)

    def look(self, now: float, waiting: set[str]) -> None:
        """After the admissions of a step: who still waits now has waited since the last look."""
        ranges: dict[tuple[str, str], tuple[float, float]] = {}
        lows: dict[tuple[str, str], float] = {}
        for one in waiting:
            for other in self.everyone:
                ahead = self.service.get(other, 0.0) - self.service.get(one, 0.0)
                if other in waiting and one < other:
                    low, high = self._ranges.get((one, other), (ahead, ahead))
                    low, high = min(low, ahead), max(high, ahead)
                    ranges[one, other] = low, high
                    self.apart = max(self.apart, high - low)
                if self.pairs:
                    lows[one, other] = min(self._lows.get((one, other), ahead), ahead)
                    self.behind = max(self.behind, ahead - lows[one, other])
        self._ranges, self._lows = ranges, lows
        self.apart_at.append((now, self.apart))

    def apart_by(self, when: float) -> float:
        return max((apart for at, apart in self.apart_at if at <= when), default=0.0)


@dataclass
class _Running:
    request: Request
    left: int
    room: int


class FairServer:
    """Serves arrivals in the order of `queue`, with prompts at `input_charge` and answers at `output_charge`."""

    def __init__(self, queue: Queue, memory: int, watch: Watch) -> None:
        self.queue = queue
        self.memory = memory
        self.watch = watch
        self.now = 0.0
        self.tokens = 0
        self.idle_with_work = 0
        self._free = memory
        self._running: list[_Running] = []
        self._waiting: dict[str, int] = {}
        self._answers: dict[str, int] = {}

    def run(self, arrivals: Iterable[Arrival], until: float = math.inf) -> None:
        pending = sorted(arrivals, key=lambda arrival: arrival.at)[::-1]
        count = 0
        while self.now < until and (pending or self._running or len(self.queue)):
            if not self._running and not len(self.queue):
                self.now = max(self.now, pending[-1].at)
            while pending and pending[-1].at <= self.now:
                self._push(str(count), pending.pop())
                count += 1
            prefill = self._admit()
            self.idle_with_work += not self._running
            self.now += STEP_S + STEP_S_PER_ROW * len(self._running) + STEP_S_PER_PREFILL_TOKEN * prefill
            self._generate()
            self.watch.look(self.now, {tenant for tenant, waiting in self._waiting.items() if waiting})

    def _push(self, name: str, arrival: Arrival) -> None:
        assert arrival.prompt + arrival.output <= self.memory
        request = make_request(name, [1] * arrival.prompt, queued=arrival.at, tenant=arrival.tenant)
        self._answers[name] = arrival.output
        self._waiting[arrival.tenant] = self._waiting.get(arrival.tenant, 0) + 1
        self.queue.push(request)

    def _admit(self) -> int:
        prefill = 0
        while (request := self.queue.peek(self.now)) is not None:
            answer = self._answers[request.request_id]
            room = request.prompt_len + answer
            if room > self._free:
                break
            assert self.queue.pop() is request
            self._free -= room
            self._waiting[request.tenant] -= 1
            self._running.append(_Running(request, answer, room))
            self.queue.served(request, input_tokens=request.prompt_len)
            self.watch.charge(request.tenant, request.prompt_len)
            self.tokens += request.prompt_len
            prefill += request.prompt_len
        return prefill

    def _generate(self) -> None:
        for running in self._running:
            running.left -= 1
            self.queue.served(running.request, output_tokens=1)
            self.watch.charge(running.request.tenant, 2)
            self.tokens += 1
            if not running.left:
                self._free += running.room
                running.request.state = RequestState.FINISHED_LENGTH
                self.queue.finished(running.request)
        self._running = [running for running in self._running if running.left]
