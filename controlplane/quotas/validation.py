"""What limits and raises may look like. Layer: service. Pure: raises InvalidRequestError naming the field."""

from __future__ import annotations

from datetime import datetime, timedelta

from controlplane.errors import InvalidRequestError
from controlplane.quotas.schemas import Away, QuotaKind
from controlplane.quotas.views import LARGEST_AMOUNT

WITHOUT_REDIS = frozenset({QuotaKind.MAX_PROMPT_TOKENS, QuotaKind.MAX_OUTPUT_TOKENS})
"""Judged from the request alone."""
LONGEST_GRANT = timedelta(days=366)


def check_quota(*, kind: QuotaKind, soft: int | None, hard: int | None, away: Away, local: int) -> None:
    """A limit limits something, warns before it refuses, and says how it counts without Redis."""
    check_amount("soft", soft)
    check_amount("hard", hard)
    check_amount("local", local)
    if soft is None and hard is None:
        raise InvalidRequestError("a quota needs a hard limit, a soft one, or both", param="hard")
    if soft is not None and hard is not None and soft > hard:
        raise InvalidRequestError("the soft limit warns before the hard one refuses: it cannot be higher", param="soft")
    if kind in WITHOUT_REDIS and away is not Away.CLOSED:
        raise InvalidRequestError(f"{kind} is judged without Redis: leave away as {Away.CLOSED}", param="away")
    if away is Away.LOCAL and not 1 <= local <= (LARGEST_AMOUNT if hard is None else hard):
        raise InvalidRequestError(
            "with away local, local is what each gateway may count up to alone: 1 up to the hard limit", param="local"
        )
    if away is not Away.LOCAL and local != 0:
        raise InvalidRequestError(f"local is for away local only, and away is {away}", param="local")


def check_amount(name: str, amount: int | None) -> None:
    """An amount is a whole number in bounds."""
    if amount is not None and not 0 <= amount <= LARGEST_AMOUNT:
        raise InvalidRequestError(f"{name} must lie between 0 and {LARGEST_AMOUNT}", param=name)


def check_more(amount: int) -> None:
    if not 1 <= amount <= LARGEST_AMOUNT:
        raise InvalidRequestError(f"amount must lie between 1 and {LARGEST_AMOUNT}", param="amount")


def check_span(starts_at: datetime, expires_at: datetime, now: datetime) -> None:
    """A raise ends after it starts, not in the past, and not later than a year after its start."""
    check_zone("starts_at", starts_at)
    check_zone("expires_at", expires_at)
    if expires_at <= now:
        raise InvalidRequestError("expires_at lies in the past", param="expires_at")
    if expires_at <= starts_at:
        raise InvalidRequestError("expires_at must lie after starts_at", param="expires_at")
    if expires_at - starts_at > LONGEST_GRANT:
        raise InvalidRequestError(
            f"a temporary raise lasts at most {LONGEST_GRANT.days} days: change the limit instead", param="expires_at"
        )


def check_zone(name: str, at: datetime) -> None:
    if at.tzinfo is None:
        raise InvalidRequestError(f"{name} must name its time zone, for example a trailing Z", param=name)


def check_text(name: str, text: str, *, longest: int = 500, optional: bool = False) -> str:
    """`text` without white space around it; control characters other than line ends are refused."""
    text = text.strip()
    if len(text) > longest or not (text or optional) or not text.replace("\n", "").replace("\r", "").isprintable():
        least = 0 if optional else 1
        raise InvalidRequestError(f"{name} must have {least} to {longest} printable characters", param=name)
    return text


def check_name(name: str, text: str | None, *, longest: int = 200) -> str:
    """A model's or pool's name as stored: empty for None, which stands for any."""
    if text is None:
        return ""
    if not text.strip() or len(text) > longest or not text.isprintable():
        raise InvalidRequestError(f"{name} must have 1 to {longest} printable characters, or be null", param=name)
    return text
