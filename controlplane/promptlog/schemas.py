"""What travels from gateways, and what operators see of logged requests. Layer: service. Plain data."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import Meta

from controlplane.tenants.schemas import Redaction

MAX_TEXT = 16_384
"""Characters kept of a prompt, and of an answer."""
MAX_BATCH = 20
"""Entries of one delivery."""

_Name = Annotated[str, Meta(max_length=200)]
_Text = Annotated[str, Meta(max_length=2 * MAX_TEXT)]
"""A redaction may be a little longer than what it stands for."""


class LoggedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One request as a gateway sends it, redacted. `at` is Unix seconds."""

    tenant_id: UUID
    at: float
    request_id: _Name
    project: _Name
    key_id: _Name
    model: _Name
    outcome: Annotated[str, Meta(max_length=16)]
    reason: _Name
    status: Annotated[int, Meta(ge=0, le=999)]
    prompt: _Text
    answer: _Text
    cut: bool
    redactions: Annotated[int, Meta(ge=0, le=100_000)]


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway sends at once."""

    entries: Annotated[list[LoggedEntry], Meta(max_length=MAX_BATCH)]


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """How many were stored; the others' tenants have turned it off, or are no more."""

    stored: int


class PromptLogView(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant has asked for. Without `log_prompts` nothing is kept, and the rest is what turning it on means."""

    tenant: str
    log_prompts: bool
    retention_days: int
    sample: float
    redact: list[Redaction]
    templates: list[str]


class EntryView(msgspec.Struct, frozen=True, kw_only=True):
    """One logged request without its texts."""

    id: int
    tenant: str
    at: datetime
    request_id: str
    project: str
    key_id: str
    model: str
    outcome: str
    reason: str
    status: int
    cut: bool
    redactions: int
    prompt_characters: int
    answer_characters: int


class EntryText(msgspec.Struct, frozen=True, kw_only=True):
    """One logged request with its texts; whoever is given it is on record."""

    entry: EntryView
    prompt: str
    answer: str


class ReadView(msgspec.Struct, frozen=True, kw_only=True):
    """Who read which logged request, and when."""

    at: datetime
    reader: str
    tenant: str
    entry_id: int
    request_id: str
