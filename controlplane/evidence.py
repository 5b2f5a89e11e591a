"""Evidence: a figure that knows where it comes from.

Layer: service. Each number the product shows is `configured`, `calibrated` or `observed` (DESIGN §1.6).
Figures of one unit may be compared whatever their kind; arithmetic across kinds raises.
"""

from __future__ import annotations

import enum

import msgspec


class EvidenceKind(enum.StrEnum):
    CONFIGURED = "configured"
    CALIBRATED = "calibrated"
    OBSERVED = "observed"


class MixedEvidenceError(TypeError):
    """Two figures of different kind or unit were combined."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """`value` in `unit`; `source` names the table, model or reporter; `window_s` and `n` bound an observation.

    `above` marks a value known only to lie above `value` (histogram overflow): it reads ">value".
    `error` is the largest relative error (a histogram's bucket width), 0 for exact counts.
    """

    value: float
    unit: str
    kind: EvidenceKind
    source: str
    window_s: float | None = None
    n: int | None = None
    above: bool = False
    error: float = 0.0

    def _combine(self, other: Evidence, value: float) -> Evidence:
        if self.kind is not other.kind or self.unit != other.unit:
            raise MixedEvidenceError(
                f"cannot combine {self.kind} {self.unit} from {self.source} "
                f"with {other.kind} {other.unit} from {other.source}"
            )
        n = None if self.n is None or other.n is None else self.n + other.n
        return msgspec.structs.replace(
            self, value=value, source=f"{self.source}+{other.source}", n=n, error=max(self.error, other.error)
        )

    def __add__(self, other: Evidence) -> Evidence:
        return self._combine(other, self.value + other.value)

    def __sub__(self, other: Evidence) -> Evidence:
        return self._combine(other, self.value - other.value)
