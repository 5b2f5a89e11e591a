"""Everything the gateway learns about one inference request.

Layer: service. One record feeds the histograms, the counters and the request log, so that they cannot disagree. It must
never hold prompt or answer text, nor a secret.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from controlplane.errors import TidegateError
from controlplane.gateway.chunks import Usage, usable
from controlplane.tenants.schemas import KeyGrant
from dataplane.protocol import HEADER_REASON, Histogram

MAX_MESSAGE = 200
"""Characters kept of what a refused client was told."""


class Outcome(enum.StrEnum):
    """How a request ended; it ends in exactly one. What is refused, whoever refused it, was never accepted."""

    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class RequestRecord:
    """Times: `at` is Unix seconds, the others are seconds. `model` is a known model's name or empty: a client's
    text never becomes a label. `reason` is the finish reason, the refusal's code or the failure's cause. `grant` is
    None when the request brought no usable key.
    """

    request_id: str
    grant: KeyGrant | None
    at: float
    accepted: float
    """The request's arrival on the monotonic clock, without the wait for the client to send its body."""
    model: str = ""
    pool: str = ""
    replica: str = ""
    attempt_id: str = ""
    stream: bool = False
    accepted_counted: bool = False
    """`accepted` is counted once, on the replica that took the request; the TTFTs once, when they are known."""
    ttft_counted: bool = False
    ttft_visible_counted: bool = False
    status: int = 0
    outcome: Outcome | None = None
    reason: str = ""
    refused_quota: str = ""
    refused_kind: str = ""
    refused_message: str = ""
    """Of a request that was refused: the limit in the way, if one was, and the sentence the client was told."""
    ttft_s: float | None = None
    ttft_visible_s: float | None = None
    tpot_s: float | None = None
    itl: Histogram | None = None
    e2e_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    usage_told: bool = False
    """The engine has counted both prompt and output; what it did not is 0 above."""

    @property
    def tenant(self) -> str:
        """The tenant's slug; empty without a usable key."""
        return self.grant.tenant if self.grant is not None else ""

    @property
    def key_id(self) -> str:
        return self.grant.key_id if self.grant is not None else ""

    def conclude(self, outcome: Outcome, reason: str, status: int) -> None:
        """Say how the request ended; the first conclusion stands."""
        if self.outcome is None:
            self.outcome, self.reason, self.status = outcome, reason, status

    def refuse(self, error: TidegateError) -> None:
        """The request ends refused by `error`, unless it has ended already."""
        if self.outcome is None:
            self.conclude(Outcome.REFUSED, error.code, error.status)
            said = error.message[:MAX_MESSAGE]  # it may quote the client
            self.refused_message = "".join(each if each.isprintable() else "?" for each in said)
            told = dict(part.partition("=")[::2] for part in error.headers.get(HEADER_REASON, "").split("; "))
            self.refused_quota, self.refused_kind = told.get("quota", ""), told.get("limit", "")

    def take_usage(self, usage: Usage | None) -> None:
        """The engine's own token counts."""
        if usage is not None:
            prompt, output = usable(usage.prompt_tokens), usable(usage.completion_tokens)
            self.usage_told = prompt is not None and output is not None
            self.prompt_tokens, self.output_tokens = prompt or 0, output or 0
            self.cached_tokens = min(usable(usage.cached_tokens) or 0, self.prompt_tokens)
