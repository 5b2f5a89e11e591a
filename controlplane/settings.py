"""Settings of the control-plane processes, read once from the environment.

Layer: service. Every variable is `TIDEGATE_<FIELD>` except DATABASE_URL and REDIS_URL. `Settings.from_env`
raises SettingsError naming the variable; nothing else reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class SettingsError(ValueError):
    """A variable is missing or wrong; the message names it."""


class Secret:
    """A string that does not print. `reveal()` is the only way to the value."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> Any:
        raise TypeError("a Secret is not serialised")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One process's settings; every process of a deployment gets the same ones."""

    database_url: Secret
    """postgresql://user:password@host:port/db; drivers are chosen by the code."""
    redis_url: Secret
    """redis://:password@host:port/db"""
    home: Path
    """Where files live: logs, spools, snapshots. `.tidegate` by default."""
    internal_token: Secret
    """Bearer token between gateway, replicas and control plane."""
    session_secret: Secret
    """Signs CSRF tokens and policy snapshots on disk."""
    metrics_token: Secret = msgspec.field(default_factory=lambda: Secret(""))
    """Bearer token for /metrics; empty means the internal token is asked for."""
    metrics_open: bool = False
    """True serves /metrics to anybody who reaches the port."""
    control_url: str = "http://127.0.0.1:7300"
    """Where gateways and replicas send reports."""
    public_gateway_url: str = "http://127.0.0.1:7301"
    """The gateway's address as tenants see it; shown in the console."""
    gateway_id: str = "gateway-0"
    cookie_secure: bool = False
    """True when the console is served over TLS: session cookies get the Secure flag."""
    max_body_bytes: int = 4 * 1024 * 1024
    """Larger request bodies on /v1 are refused with 413."""
    max_in_flight: int = 1024
    """Requests one gateway process holds at once; one more is refused with 503."""
    upstream_timeout_s: float = 600.0
    """Longest wait for a replica's next byte."""
    stale_after_s: float = 5.0
    lost_after_s: float = 15.0
    report_interval_s: float = 1.0
    log_level: str = "INFO"

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            name = {"database_url": "DATABASE_URL", "redis_url": "REDIS_URL"}.get(
                field.name, f"TIDEGATE_{field.name.upper()}"
            )
            raw = env.get(name)
            if raw is None or (raw == "" and field.name != "metrics_token"):
                if field.required:
                    raise SettingsError(f"{name} is not set")
                continue
            values[field.name] = _convert(name, raw, field.type)
        return cls(**values)


def _convert(name: str, raw: str, kind: Any) -> Any:
    if kind is Secret:
        return Secret(raw)
    if kind is Path:
        return Path(raw).absolute()
    try:
        return msgspec.convert(raw, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{name}={raw!r} is not valid: {error}") from None
