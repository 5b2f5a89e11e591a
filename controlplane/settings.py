"""Settings of the control-plane processes, read once from the environment.

Layer: service. Every variable is `TIDEGATE_<FIELD>` except DATABASE_URL and REDIS_URL. `Settings.from_env`
raises SettingsError naming the variable, its value unless it is secret, and what is wanted; it never lets a value
through that a process would stumble over later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from controlplane import egress

HOME = Path(".tidegate")
DATABASE_SHAPE = "postgresql://user:password@host:port/database"
REDIS_SHAPE = "redis://:password@host:port/database"
SHORTEST_SECRET = 16
LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")


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


# What a description says completes "it must be …".
Seconds = Annotated[float, Meta(gt=0, le=86400, description="a number of seconds above 0 and up to 86400")]
Bytes = Annotated[int, Meta(ge=1, le=2**30, description=f"a whole number of bytes from 1 to {2**30}")]
SpoolBytes = Annotated[
    int, Meta(ge=1 << 20, le=2**36, description=f"a whole number of bytes from {1 << 20} to {2**36}")
]
Requests = Annotated[int, Meta(ge=1, le=1_000_000, description="a whole number from 1 to 1000000")]
Milliseconds = Annotated[int, Meta(ge=1, le=60_000, description="a whole number of milliseconds from 1 to 60000")]
LeaseSeconds = Annotated[float, Meta(ge=3, le=3600, description="a number of seconds from 3 to 3600")]
Tokens = Annotated[int, Meta(ge=1, le=2**31, description=f"a whole number of tokens from 1 to {2**31}")]
Flag = Annotated[bool, Meta(description="true or false")]
Url = Annotated[
    str, Meta(pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$", description="an address such as http://127.0.0.1:7300")
]
_ADDRESS = r"https?://[^\s/?#,]+(/[^\s?#,]*)?"
Urls = Annotated[
    str,
    Meta(
        pattern=f"^({_ADDRESS}(,{_ADDRESS})*)?$",
        description="addresses such as http://10.0.0.1:7301,http://10.0.0.2:7301",
    ),
]
Networks = Annotated[str, Meta(max_length=2000, description="networks such as 10.0.0.0/8,fd00::/8")]
FolderName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="at most 63 letters, digits, dots, dashes and underscores, beginning with a letter or digit",
    ),
]
LogLevel = Annotated[str, Meta(pattern=f"^(?i:{'|'.join(LOG_LEVELS)})$", description=f"one of {', '.join(LOG_LEVELS)}")]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One process's settings; every process of a deployment gets the same ones."""

    database_url: Secret
    """postgresql://user:password@host:port/db; drivers are chosen by the code."""
    redis_url: Secret
    """redis://:password@host:port/db"""
    internal_token: Secret
    """Bearer token between gateway, replicas and control plane."""
    session_secret: Secret
    """Signs CSRF tokens and policy snapshots on disk."""
    home: Path = msgspec.field(default_factory=HOME.absolute)
    """Where files live: logs, spools, snapshots. `.tidegate` by default."""
    metrics_token: Secret = msgspec.field(default_factory=lambda: Secret(""))
    """Bearer token for /metrics; empty means the internal token is asked for."""
    metrics_open: Flag = False
    """True serves /metrics to anybody who reaches the port."""
    control_url: Url = "http://127.0.0.1:7300"
    """Where gateways and replicas send reports."""
    public_gateway_url: Url = "http://127.0.0.1:7301"
    """The gateway's address as tenants see it; shown in the console."""
    gateway_id: FolderName = "gateway-0"
    cookie_secure: Flag = False
    """True when the console is served over TLS: session cookies get the Secure flag."""
    max_body_bytes: Bytes = 4 * 1024 * 1024
    """Larger request bodies on /v1 are refused with 413."""
    max_in_flight: Requests = 1024
    """Requests one gateway process holds at once; one more is refused with 503."""
    upstream_timeout_s: Seconds = 600.0
    """Longest wait for a replica's next byte."""
    replica_networks: Networks = f"{egress.PRIVATE},{egress.LOOPBACK}"
    """Where replicas may be: registered and connected to nowhere else, and never at link-local or metadata
    addresses. `tidegate up` says loopback."""
    stale_after_s: Seconds = 5.0
    """Silence after which a replica is STALE; shorter than `lost_after_s`."""
    lost_after_s: Seconds = 15.0
    report_interval_s: Seconds = 1.0
    lease_deadline_ms: Milliseconds = 50
    """Longest a gateway waits for Redis when it takes or settles a lease; then the limits' declared modes decide."""
    lease_ttl_s: LeaseSeconds = 60.0
    """How long a lease outlives a gateway that died; those of requests in flight are renewed."""
    assumed_context: Tokens = 8192
    """Longest context of models whose replicas have not told theirs: bounds the output of a request without a limit."""
    canary_every_s: Seconds = 3600.0
    """How often each limit is proven on each gateway; what was not proven for twice as long is overdue."""
    canary_gateways: Urls = ""
    """The gateways that canaries probe, by commas; `public_gateway_url` when empty."""
    usage_spool_bytes: SpoolBytes = 256 * 1024 * 1024
    """Usage records that a gateway keeps on disk until the ledger has them; when they are full it refuses requests."""
    assumed_slots: Requests = 256
    """Requests that a replica holds at once where neither it nor its pool's setting tells."""
    long_prompt: Tokens = 4096
    """Prompts of which so many tokens must be computed wait in a lane of their own."""
    queue_short: Requests = 256
    """Requests for one model that wait in one gateway; more shed or are refused with 503."""
    queue_long: Requests = 32
    """The same for long prompts."""
    queue_tenant: Requests = 128
    """The most of either that are one tenant's."""
    queue_wait_s: Seconds = 60.0
    """Longest wait of a request for its turn."""
    log_level: LogLevel = "INFO"

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            name = variable(field.name)
            raw = env.get(name)
            if raw is None or (raw == "" and field.name != "metrics_token"):
                if field.required:
                    raise SettingsError(f"{name} is not set")
                continue
            values[field.name] = _convert(name, raw, field.type)
        settings = cls(**values)
        settings._check()
        return settings

    @property
    def probed_gateways(self) -> tuple[str, ...]:
        """The addresses of the gateways whose limits are proven, each once."""
        named = [url.rstrip("/") for url in self.canary_gateways.split(",") if url]
        return tuple(dict.fromkeys(named or [self.public_gateway_url.rstrip("/")]))

    def _check(self) -> None:
        """What one field's type cannot say."""
        require_database_url(self.database_url)
        require_redis_url(self.redis_url)
        for field in ("internal_token", "session_secret"):
            if len(getattr(self, field).reveal()) < SHORTEST_SECRET:
                raise SettingsError(f"{variable(field)} must have at least {SHORTEST_SECRET} characters")
        for field in ("control_url", "public_gateway_url"):
            if not _has_place(url := getattr(self, field)):
                raise SettingsError(f"{variable(field)}={url!r} is not valid: its host or port is wrong")
        if not all(map(_has_place, self.probed_gateways)):
            raise SettingsError(
                f"TIDEGATE_CANARY_GATEWAYS={self.canary_gateways!r} is not valid: a host or port is wrong"
            )
        try:
            egress.parse_networks(self.replica_networks)
        except ValueError as error:
            raise SettingsError(f"TIDEGATE_REPLICA_NETWORKS={self.replica_networks!r} is not valid: {error}") from None
        if self.lease_deadline_ms >= self.lease_ttl_s * 1000 / 3:
            raise SettingsError(
                f"TIDEGATE_LEASE_DEADLINE_MS={self.lease_deadline_ms} is not valid: it must be less than a third of "
                f"TIDEGATE_LEASE_TTL_S, which is {self.lease_ttl_s:g} s"
            )
        if self.stale_after_s >= self.lost_after_s:
            raise SettingsError(
                f"TIDEGATE_STALE_AFTER_S={self.stale_after_s:g} is not valid: "
                f"it must be less than TIDEGATE_LOST_AFTER_S, which is {self.lost_after_s:g}"
            )


def variable(field: str) -> str:
    """The environment variable of a field of `Settings`."""
    return {"database_url": "DATABASE_URL", "redis_url": "REDIS_URL"}.get(field, f"TIDEGATE_{field.upper()}")


def default_home(env: Mapping[str, str] | None = None) -> Path:
    """The home folder of a command that was given none: TIDEGATE_HOME, else ./.tidegate."""
    env = os.environ if env is None else env
    return Path(env.get("TIDEGATE_HOME") or HOME)


def require_database_url(url: Secret) -> None:
    """Raise SettingsError, without quoting the URL, when DATABASE_URL has not the right form."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parts = make_url(url.reveal())
        urlsplit(url.reveal())
    except (ArgumentError, ValueError):
        raise SettingsError(f"DATABASE_URL is not a URL of the form {DATABASE_SHAPE}") from None
    known = parts.drivername.split("+")[0] in {"postgresql", "postgres"}
    if not known or not parts.database or (parts.port is not None and not 0 < parts.port < 65536):
        raise SettingsError(f"DATABASE_URL must have the form {DATABASE_SHAPE}")


def require_redis_url(url: Secret) -> None:
    """Raise SettingsError, without quoting the URL, when REDIS_URL has not the right form."""
    from redis import Redis

    try:
        parts = urlsplit(url.reveal())
        Redis.from_url(url.reveal()).close()
    except ValueError:
        raise SettingsError(f"REDIS_URL is not a URL of the form {REDIS_SHAPE}") from None
    numbered = (parts.path.strip("/") or "0").isdecimal()
    if parts.scheme not in {"redis", "rediss"} or not _has_place(url.reveal()) or not numbered:
        raise SettingsError(f"REDIS_URL must have the form {REDIS_SHAPE}")


def _has_place(url: str) -> bool:
    """True when `url` names a host, and a port only if there can be one."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _convert(name: str, raw: str, kind: Any) -> Any:
    if kind is Secret:
        return Secret(raw)
    if kind is Path:
        return Path(raw).absolute()
    try:
        return msgspec.convert(raw, type=kind, strict=False)
    except msgspec.ValidationError:
        wanted = next(meta.description for meta in kind.__metadata__ if meta.description)
        raise SettingsError(f"{name}={raw!r} is not valid: it must be {wanted}") from None
