"""What a client is told of its quotas: refusals, and the headers of what passed.

Layer: service. Pure. 429 for a limit that is reached, 400 for a request that is larger than one request may be, 503 for
a limit that cannot be asked. `Retry-After` is exact for windows and marked an estimate for concurrency; where waiting
cannot help there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from controlplane.admission.answers import Granted, Refusal, Refused, SoftLimit, ratelimit_headers
from controlplane.admission.charges import Oversize
from controlplane.errors import CapacityError, InvalidRequestError, RateLimitedError, TidegateError
from controlplane.gateway.asgi import Headers
from controlplane.layers import Layer
from controlplane.quotas.schemas import QuotaKind, QuotaLevel
from dataplane.protocol import HEADER_REASON

HEADER_RETRY = "x-tidegate-retry"
"""`estimate` where Retry-After is one."""
HEADER_WARNING = "x-tidegate-quota-warning"
"""Names a soft limit that the request has passed; one header for each."""
STORE_AWAY = "quota_store_unavailable"

_COUNTED = {
    QuotaKind.REQUESTS_PER_MINUTE: "requests per minute",
    QuotaKind.TOKENS_PER_MINUTE: "tokens per minute",
    QuotaKind.INPUT_TOKENS_PER_MINUTE: "input tokens per minute",
    QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE: "uncached input tokens per minute",
    QuotaKind.OUTPUT_TOKENS_PER_MINUTE: "output tokens per minute",
    QuotaKind.CONCURRENT_REQUESTS: "concurrent requests",
    QuotaKind.TOKENS_PER_DAY: "tokens per day",
    QuotaKind.TOKENS_PER_MONTH: "tokens per month",
    QuotaKind.MONEY_PER_DAY: "micro-units of money per day",
    QuotaKind.MONEY_PER_MONTH: "micro-units of money per month",
    QuotaKind.MAX_PROMPT_TOKENS: "tokens in a prompt",
    QuotaKind.MAX_OUTPUT_TOKENS: "tokens in an answer",
}
_WHOSE = {
    QuotaLevel.TENANT: "the tenant's",
    QuotaLevel.PROJECT: "the project's",
    QuotaLevel.KEY: "the API key's",
}


def code_of(kind: QuotaKind) -> str:
    """The error code of a limit of `kind` that is in the way."""
    return f"{kind.value}_exceeded"


def refused(outcome: Refused) -> TidegateError:
    """The error for limits that are in the way; of several, the one that is longest in the way is named."""
    refusal = outcome.refusals[0]
    headers = ratelimit_headers(outcome.standings)
    if outcome.away:
        return _away(next(one for one in outcome.refusals if one.away), headers)
    code = code_of(refusal.kind)
    headers[HEADER_REASON] = _reason(code, refusal)
    limit = f"{_WHOSE[refusal.level]} limit of {refusal.limit} {_COUNTED[refusal.kind]}"
    wait = outcome.retry_after_s
    if wait is None:
        headers["x-should-retry"] = "false"
        return RateLimitedError(_never(refusal, limit), code=code, headers=headers)
    seconds = max(1, math.ceil(wait))
    headers["retry-after"] = str(seconds)
    if not outcome.exact:
        headers[HEADER_RETRY] = "estimate"
        headers[HEADER_REASON] += "; retry-after=estimate"
    return RateLimitedError(
        f"This request would pass {limit}: {refusal.used} are used or reserved and it could use {refusal.amount} more. "
        f"Try again in {seconds} s.",
        code=code,
        headers=headers,
    )


def too_large(oversize: Oversize, params: tuple[str, str], *, counted: bool) -> InvalidRequestError:
    """The error for one request that is larger than a limit on single requests. `params` are the names under which the
    client gave prompt and output limit; `counted` says that the prompt's tokens are not only bounded.
    """
    code = code_of(oversize.kind)
    limit = f"{_WHOSE[oversize.level]} limit is {oversize.limit} {_COUNTED[oversize.kind]}"
    if oversize.kind is QuotaKind.MAX_PROMPT_TOKENS:
        tokens = f"has {oversize.amount} tokens" if counted else f"could have {oversize.amount} tokens (one a byte)"
        message, param = f"The prompt {tokens}; {limit}.", params[0]
    else:
        message, param = f"The answers could have {oversize.amount} tokens; {limit}. Set {params[1]}.", params[1]
    return InvalidRequestError(message, code=code, param=param, headers={HEADER_REASON: _reason(code, oversize)})


def granted_headers(granted: Granted, oversize: Iterable[Oversize]) -> Headers:
    """The headers of an answer that a lease was taken for."""
    headers = [(name.encode(), value.encode()) for name, value in ratelimit_headers(granted.standings).items()]
    headers += [(HEADER_WARNING.encode(), _warning(one, one.used, one.soft)) for one in granted.warnings]
    headers += [(HEADER_WARNING.encode(), _warning(one, one.amount, one.limit)) for one in oversize]
    return headers


def _never(refusal: Refusal, limit: str) -> str:
    """What to do about a limit that waiting cannot help with."""
    if refusal.limit == 0:
        return f"{limit[0].upper()}{limit[1:]} lets no request through: ask for a higher one (POST /v1/quota/requests)."
    unit = _COUNTED[refusal.kind].partition(" per ")[0]
    return (
        f"This request alone could use {refusal.amount} {unit}, more than {limit} allows; waiting does not help. "
        "Ask for fewer tokens (max_tokens)."
    )


def _away(refusal: Refusal, headers: dict[str, str]) -> CapacityError:
    """A limit that is declared closed, or whose share in this process is used up, while the store is away."""
    headers[HEADER_REASON] = _reason(STORE_AWAY, refusal) + "; retry-after=estimate"
    headers["retry-after"] = str(max(1, math.ceil(refusal.retry_after_s or 1.0)))
    headers[HEADER_RETRY] = "estimate"
    return CapacityError(
        f"{_WHOSE[refusal.level].capitalize()} limit on {_COUNTED[refusal.kind]} cannot be asked at the moment; try "
        "again.",
        code=STORE_AWAY,
        headers=headers,
    )


def _reason(code: str, one: Refusal | Oversize) -> str:
    return f"{code}; limit={one.kind.value}; scope={one.level.value}; quota={one.quota_id}; layer={Layer.SERVICE.value}"


def _warning(one: SoftLimit | Oversize, used: int, soft: int) -> bytes:
    return f"{one.kind.value}; scope={one.level.value}; used={used}; soft={soft}".encode()
