"""Logging of the control-plane processes: one JSON object a line, with secrets masked.

Layer: service. Every record passes the mask as its last step, messages and tracebacks alike: API keys, admin
tokens, Authorization values, session cookies, passwords in URLs, and the literal secrets of the settings. Prompts
are never logged; nothing here tries to mask them.
"""

from __future__ import annotations

import json
import logging
import logging.config
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from controlplane.settings import Secret, Settings

MASK = "***"
_SHORTEST_LITERAL = 8
"""A shorter configured secret would mask ordinary words."""

_PATTERNS = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"\btg_([0-9a-z]{1,11})_[0-9a-z]+", rf"tg_\1_{MASK}"),
        (r"\btga_[0-9a-z]+", f"tga_{MASK}"),
        (r"\b(bearer|basic)(\s+|%20)[^\s\"',;]+", rf"\1 {MASK}"),
        (r"(authorization|x-csrftoken|set-cookie|cookie)(['\"]?\s*[:=,]\s*b?['\"]?)[^'\"\r\n]+", rf"\1\2{MASK}"),
        (r"(tidegate_session|password|passwd|_csrf_token)(['\"]?\s*[:=]\s*['\"]?)[^\s&;,'\"]+", rf"\1\2{MASK}"),
        (r"(\w+://[^\s:/@]*:)[^\s@/]+@", rf"\1{MASK}@"),
    )
)

_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}


class MaskingFormatter(logging.Formatter):
    """Renders a record as JSON and lets no known secret through."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        literals = sorted({s for s in secrets if len(s) >= _SHORTEST_LITERAL}, key=len, reverse=True)
        self._literals = re.compile("|".join(map(re.escape, literals))) if literals else None

    def mask(self, text: str) -> str:
        """`text` without anything that looks like a secret or is one of ours."""
        if self._literals is not None:
            text = self._literals.sub(MASK, text)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.mask(record.getMessage()),
        }
        for name, value in record.__dict__.items():
            if name not in _OWN and not name.startswith("_"):
                line[name] = value if isinstance(value, int | float | bool | None) else self.mask(str(value))
        if record.exc_info:
            line["traceback"] = self.mask(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = self.mask(record.stack_info)
        return json.dumps(line, ensure_ascii=False)


def secrets_of(settings: Settings) -> tuple[str, ...]:
    """Every literal that must never be printed, passwords inside URLs included."""
    found = []
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Secret) and value:
            text = value.reveal()
            found.append(text)
            if "://" in text and (password := urlsplit(text).password):
                found.append(password)
    return tuple(found)


def logging_config(settings: Settings) -> dict[str, Any]:
    """A `logging.config` dictionary: everything to standard error, masked."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"masked": {"()": MaskingFormatter, "secrets": secrets_of(settings)}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "masked", "stream": "ext://sys.stderr"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            "tidegate": {"level": settings.log_level.upper()},
            "uvicorn.access": {"level": "CRITICAL", "propagate": False},
        },
    }


def configure_logging(settings: Settings) -> None:
    """Make this process log that way."""
    logging.config.dictConfig(logging_config(settings))
