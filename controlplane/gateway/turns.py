"""A request that wants its turn in a model's line, and the turn that it got.

Layer: service. A turn is ended once, whatever became of the request, and tells the line what was learned of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from controlplane.admission.bands import Band, Lane
from controlplane.admission.dispatch import Waiting
from controlplane.admission.prediction import Prediction
from controlplane.admission.retry import Asker
from controlplane.gateway.record import RequestRecord

if TYPE_CHECKING:
    from controlplane.gateway.line import Line


class Newly(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that wants its turn. `most_input` bounds its prompt, `most_output` its answers, in tokens; `weight` is
    its tenant's, `asker` is known again when it comes back; `objective_s` the TTFT promised to it, `deadline_s` the
    client's own, both from its arrival.
    """

    tenant: str
    asker: Asker
    weight: float
    band: Band
    most_input: int
    most_output: int
    deadline_s: float | None = None
    objective_s: float | None = None


class Turn:
    """A request that was let go; `end` it once, whatever becomes of it."""

    __slots__ = ("_dispatched", "_line", "_most_input", "_prediction", "_request", "tag")

    def __init__(
        self, line: Line, request: Waiting, tag: float, most_input: int, prediction: Prediction | None
    ) -> None:
        self.tag = tag
        self._line = line
        self._request = request
        self._most_input = most_input
        self._dispatched = time.monotonic()
        self._prediction = prediction

    @property
    def lane(self) -> Lane:
        return self._request.lane

    def watch(self, progress: Callable[[], int]) -> None:
        """`progress` tells the tokens generated so far."""
        self._line.queue.watch(self._request.request_id, progress)

    def end(self, record: RequestRecord, *, served: bool) -> None:
        """Give the place back. `served` says that a replica took the request; `record` what it said of it."""
        line, request = self._line, self._request
        if not served:
            line.queue.finish(request.request_id, output=0, read=(0, 0))
            return
        line.pace.held(time.monotonic() - self._dispatched)
        if not record.prompt_tokens:
            line.queue.finish(request.request_id)
            return
        uncached, cached = record.prompt_tokens - record.cached_tokens, record.cached_tokens
        line.queue.finish(request.request_id, output=record.output_tokens, read=(uncached, cached))
        line.pace.counted(request.tenant, self._most_input, record.prompt_tokens, cached, record.output_tokens)
        if record.ttft_s is None:
            return
        line.first_token(uncached, record.accepted + record.ttft_s - self._dispatched)
        if self._prediction is not None:
            line.observed(request.tenant, self._prediction, record.ttft_s, uncached, cached)
