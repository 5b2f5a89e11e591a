"""Steps that were planned and whose results are not in, and the requests that ended meanwhile.

Layer: scheduling. Pure. A request that ends while a later step has it keeps its blocks until that step is done: they
are being written to. Results come in the order of the plans.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from dataplane.errors import IntegrityError
from dataplane.request import Request


@dataclass(frozen=True, slots=True)
class Flight:
    """One step and those in it, in the order of the plan; forks that start in it come last."""

    step: int
    requests: list[Request]


class Flights:
    """Every step in flight, the earliest first."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self.leaving: dict[str, Request] = {}
        """Requests that ended and are still in a step, by id."""

    def __len__(self) -> int:
        return len(self._flights)

    def start(self, step: int, requests: list[Request]) -> None:
        """A step was planned."""
        for request in requests:
            request.in_flight += 1
        self._flights.append(Flight(step, requests))

    def land(self, step: int) -> list[Request]:
        """The result of `step` is in; who was in it. Raises IntegrityError unless it is the earliest in flight."""
        if not self._flights or self._flights[0].step != step:
            expected = self._flights[0].step if self._flights else "none"
            raise IntegrityError(f"the result of step {step} came; the next is that of {expected}")
        requests = self._flights.popleft().requests
        for request in requests:
            request.in_flight -= 1
        return requests

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the requests' own counts are those of the steps."""
        counts = Counter(request for flight in self._flights for request in flight.requests)
        for request in {*counts, *self.leaving.values()}:
            if request.in_flight != counts[request]:
                raise IntegrityError(f"{request.request_id} counts {request.in_flight} steps, is in {counts[request]}")
