"""What those are told whom a line does not let in, or not any more.

Layer: service. Pure. 503 with the layer that is short and a wait, marked an estimate; one that need not come back is
told so.
"""

from __future__ import annotations

from controlplane.admission.policy import Refusal
from controlplane.admission.prediction import Prediction
from controlplane.errors import CapacityError
from controlplane.gateway.errors import capacity
from controlplane.layers import Layer
from dataplane.protocol import HEADER_REASON


def refused(refusal: Refusal, prediction: Prediction | None) -> CapacityError:
    """What the client is told; one that need not come back is told so."""
    told = f"; predicted-ttft={prediction.ttft.value:.3g}s" if prediction is not None else ""
    reason = f"{refusal.code}; layer={refusal.layer.value}{told}"
    if refusal.retry_after_s is None:
        headers = {HEADER_REASON: reason, "x-should-retry": "false"}
    else:
        headers = {"retry-after": str(refusal.retry_after_s), HEADER_REASON: f"{reason}; retry-after=estimate"}
    return CapacityError(refusal.message, code=refusal.code, layer=refusal.layer, headers=headers)


def shed(retry_after_s: int) -> CapacityError:
    """For who waited and made room for another."""
    return capacity(
        "The line is full and another request goes first; try again.",
        "shed",
        layer=Layer.SCHEDULING,
        retry_after_s=retry_after_s,
    )


def waited_out(wait_s: float, retry_after_s: int) -> CapacityError:
    """For who waited as long as anybody may."""
    return capacity(
        f"No replica had room for the request within {wait_s:g} s; try again.",
        "queue_wait_exceeded",
        layer=Layer.SCHEDULING,
        retry_after_s=retry_after_s,
    )


def queue_full(retry_after_s: int) -> CapacityError:
    """For whom the shared queue has no room."""
    return capacity(
        "The pool's queue takes no more requests; try again.",
        "queue_full",
        layer=Layer.SCHEDULING,
        retry_after_s=retry_after_s,
    )
