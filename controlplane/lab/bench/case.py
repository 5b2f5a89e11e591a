"""What the parts of the gateway's bench have in common.

Layer: service. Plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from controlplane.lab.bench import requests
from controlplane.lab.bench.deployment import Deployment
from controlplane.lab.bench.report import Section
from controlplane.lab.bench.requests import Target

TOKENS = 16
"""Output of a request that is not streamed."""
STREAM_TOKENS = 256
"""Output of a stream."""


@dataclass(frozen=True, slots=True)
class GatewayCase:
    """All that shapes a run. `quick` makes it short: the directions stay, the figures are rough."""

    seed: int = 0
    quick: bool = False

    def size(self, full: float, quick: float) -> float:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Bench:
    """A running deployment and the tools to measure it. `tell` hears what is being done."""

    case: GatewayCase
    deployment: Deployment
    wrk: str
    tell: Callable[[str], None]

    def request(
        self, target: Target, *, tokens: int = TOKENS, stream: bool = False, pace: Mapping[str, str] | None = None
    ) -> bytes:
        return requests.request(target, requests.body(target, tokens=tokens, stream=stream, pace=pace))


Part = Callable[[Bench], Section]


def ratio(ours: float, plain: float) -> float | None:
    """Ours over the plain relay's; None where the relay's is lost in the noise, at 0 or below."""
    return ours / plain if plain > 0 else None


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}×"


def ms(value: float) -> str:
    return f"{value:.2f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"
