"""What the quotas domain answers to gateways and leases: limits in force, prices, and how they are counted.

Layer: service. Torch-free data. Money is counted in whole micro-units of the deployment's currency, tokens and requests
in ones, so that every sum is exact.
"""

from __future__ import annotations

import enum

import msgspec


class QuotaLevel(enum.StrEnum):
    """Whose limit it is. `KEY` limits follow a key's identity, which survives rotation (F10)."""

    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"


class QuotaKind(enum.StrEnum):
    """What is limited, in which window."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    INPUT_TOKENS_PER_MINUTE = "input_tokens_per_minute"
    UNCACHED_INPUT_TOKENS_PER_MINUTE = "uncached_input_tokens_per_minute"
    OUTPUT_TOKENS_PER_MINUTE = "output_tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    MONEY_PER_DAY = "money_per_day"
    MONEY_PER_MONTH = "money_per_month"
    MAX_PROMPT_TOKENS = "max_prompt_tokens"
    MAX_OUTPUT_TOKENS = "max_output_tokens"

    __hash__ = str.__hash__  # looked up for each limit of each request; enum's own hash is a call of Python's


class Away(enum.StrEnum):
    """What a limit does while Redis cannot be asked: refuse, count in each gateway on its own, or let pass."""

    CLOSED = "closed"
    LOCAL = "local"
    OPEN = "open"


class Raise(msgspec.Struct, frozen=True, kw_only=True):
    """A temporary grant: `amount` more than the limit, from `starts_at` until before `expires_at` (Unix seconds)."""

    amount: int
    starts_at: float
    expires_at: float


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit in force. `scope_id` is a tenant's or project's id or a key's identity; `model` is empty for any.

    Above `soft` a request passes with a warning, above `hard` it does not; at least one of them is set. With `away`
    LOCAL each gateway counts up to `local` of it for itself while Redis is away.
    """

    quota_id: str
    level: QuotaLevel
    scope_id: str
    model: str
    kind: QuotaKind
    soft: int | None = None
    hard: int | None = None
    away: Away = Away.CLOSED
    local: int = 0
    raises: tuple[Raise, ...] = ()


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What use of a pool costs, in micro-units: per million tokens, and per second of device time.

    `pool` is empty for every pool without a price of its own. It holds for requests that arrived in
    [`valid_from`, `valid_until`), Unix seconds; None is open.
    """

    pool: str
    uncached_input: int
    cached_input: int
    output: int
    device_second: int
    valid_from: float
    valid_until: float | None = None


class TenantQuotas(msgspec.Struct, frozen=True, kw_only=True):
    """All a gateway needs to take leases for one tenant: every limit of the tenant, its projects and keys."""

    tenant_id: str
    tenant: str
    time_zone: str
    limits: tuple[Limit, ...]
    prices: tuple[Price, ...]
    epoch: int
    """The policy epoch it was read at."""
