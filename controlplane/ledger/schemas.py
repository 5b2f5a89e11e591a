"""What the ledger service answers to other domains. Layer: service."""

from __future__ import annotations

import enum
from datetime import datetime

import msgspec

from dataplane.protocol import UsageBasis


class UsageDimension(enum.StrEnum):
    """What usage can be summed by; over one span all of them add up to the same (F8)."""

    TENANT = "tenant"
    MODEL = "model"
    KEY = "key"


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's, model's or key's usage over a span. `key` is empty for attempts that named none."""

    key: str
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    kv_block_seconds: float
    device_seconds: float


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as the ledger holds it."""

    attempt_id: str
    request_id: str
    tenant: str
    project: str
    key_id: str
    pool: str
    model: str
    replica: str
    boot_epoch: int
    started_at: datetime
    finished_at: datetime
    finish: str
    basis: UsageBasis
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    kv_block_seconds: float
    device_seconds: float
