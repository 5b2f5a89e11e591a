"""Whether an answer is what a limit promises. Layer: service. Pure: it reads answers and asks nobody."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from controlplane.admission.charges import COUNTERS, DAILY, SIZES, Counter
from controlplane.quotas.schemas import QuotaKind, QuotaLevel
from dataplane.protocol import HEADER_REASON

MINUTE_S = 61
DAY_S, MONTH_S = 26 * 3600, 32 * 86400
RETRY, ESTIMATE = "x-tidegate-retry", "estimate"
TOLD = {
    QuotaKind.REQUESTS_PER_MINUTE: "requests",
    QuotaKind.TOKENS_PER_MINUTE: "tokens",
    QuotaKind.INPUT_TOKENS_PER_MINUTE: "tokens",
    QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE: "tokens",
    QuotaKind.OUTPUT_TOKENS_PER_MINUTE: "tokens",
    QuotaKind.TOKENS_PER_DAY: "tokens",
    QuotaKind.TOKENS_PER_MONTH: "tokens",
}
"""The kinds whose room the headers of an answer tell, and under which name."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says an answer took."""

    prompt: int
    cached: int
    output: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway answered. `headers` have lower-case names; `code` and `param` are empty when it served."""

    status: int
    headers: Mapping[str, str]
    code: str = ""
    param: str = ""
    usage: Usage | None = None

    @property
    def served(self) -> bool:
        return self.status == 200


class Limited(msgspec.Struct, frozen=True, kw_only=True):
    """The one limit that a probe has set, as it is at the moment."""

    quota_id: str
    level: QuotaLevel
    kind: QuotaKind
    hard: int


def exceeded(kind: QuotaKind) -> str:
    """The code of a refusal by a limit of `kind`."""
    return f"{kind.value}_exceeded"


def refuses(answer: Answer, limit: Limited) -> bool:
    """Whether it was this kind of limit that refused, however well it says so."""
    return answer.code == exceeded(limit.kind)


def wrong_refusal(answer: Answer, limit: Limited, *, never: bool = False) -> str:
    """What is wrong with a refusal by `limit`, empty when nothing is. `never`: no waiting can help, because the limit
    is smaller than the request.
    """
    size = limit.kind in SIZES
    if answer.status != (400 if size else 429):
        return f"refused with {answer.status} instead of {400 if size else 429}"
    reason = answer.headers.get(HEADER_REASON, "")
    for part in (f"limit={limit.kind.value}", f"scope={limit.level.value}", f"quota={limit.quota_id}"):
        if part not in reason:
            return f"{HEADER_REASON} lacks {part}"
    if size:
        return "" if answer.param else "the refusal names no param"
    return _wrong_wait(answer, limit, never) or _wrong_room(answer, limit)


def wrong_room(answer: Answer, limit: Limited, most: int) -> str:
    """What is wrong with the room that a served answer tells, empty when nothing is or none is told for this kind:
    at most `most` may remain.
    """
    name = TOLD.get(limit.kind)
    if name is None:
        return ""
    told, remaining = (answer.headers.get(f"x-ratelimit-{word}-{name}", "") for word in ("limit", "remaining"))
    if told != str(limit.hard):
        return f"x-ratelimit-limit-{name} is {told!r}, not {limit.hard}"
    if not remaining.isdecimal() or int(remaining) > most:
        return f"x-ratelimit-remaining-{name} is {remaining!r}, not from 0 to {most}"
    return ""


def _wrong_wait(answer: Answer, limit: Limited, never: bool) -> str:
    wait = answer.headers.get("retry-after")
    held = COUNTERS[limit.kind] is Counter.HELD
    if never and not held:
        return "" if wait is None else f"Retry-After {wait} where waiting cannot help"
    if wait is None:
        return "" if never else "no Retry-After"
    longest = MINUTE_S if COUNTERS[limit.kind] is Counter.RATE else DAY_S if limit.kind in DAILY else MONTH_S
    if not wait.isdecimal() or not 1 <= int(wait) <= longest:
        return f"Retry-After {wait!r} is not from 1 to {longest}"
    if held != (answer.headers.get(RETRY) == ESTIMATE):
        return f"{RETRY} {'lacks' if held else 'says'} {ESTIMATE}"
    return ""


def _wrong_room(answer: Answer, limit: Limited) -> str:
    name = TOLD.get(limit.kind)
    if name is None:
        return ""
    remaining = answer.headers.get(f"x-ratelimit-remaining-{name}", "")
    if not remaining.isdecimal() or int(remaining) > limit.hard:
        return f"x-ratelimit-remaining-{name} is {remaining!r} with a limit of {limit.hard}"
    return ""
