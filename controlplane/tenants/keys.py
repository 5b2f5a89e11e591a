"""API keys: how they are made, read and compared.

Layer: service. Pure: no I/O. The text form is `tg_<id>_<secret><checksum>`: 11 base-62 digits of id (64 bits),
43 of secret (256 bits) and 6 of CRC-32 over everything before. A mistyped key fails its checksum and costs no
look-up. Only the SHA-256 of the secret part is ever stored: 256 random bits need no slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import zlib

import msgspec

from controlplane.settings import Secret
from controlplane.tenants.schemas import KeyGrant

PREFIX = "tg"
ID_DIGITS = 11
SECRET_DIGITS = 43
CHECKSUM_DIGITS = 6
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

_PAIRS = [high + low for high in DIGITS for low in DIGITS]
"""Base-62 digits two at a time: the checksum of each request's key is written by it."""

_SHAPE = re.compile(rf"{PREFIX}_([0-9A-Za-z]{{{ID_DIGITS}}})_([0-9A-Za-z]{{{SECRET_DIGITS}}})([0-9A-Za-z]{{6}})")


class MalformedKeyError(ValueError):
    """The text is not a key of ours: wrong shape or wrong checksum. The message never holds the text."""


class ParsedKey(msgspec.Struct, frozen=True):
    """What a presented key claims: an id, and the hash its secret has."""

    key_id: str
    secret_hash: bytes


class MintedKey(msgspec.Struct, frozen=True):
    """A fresh key. `plain` is shown once and never stored; `last4` is kept for display."""

    plain: Secret
    key_id: str
    secret_hash: bytes
    last4: str


def mint() -> MintedKey:
    """A new key from the system's randomness."""
    key_id = _base62(secrets.randbits(64), ID_DIGITS)
    secret = _base62(secrets.randbits(256), SECRET_DIGITS)
    body = f"{PREFIX}_{key_id}_{secret}"
    plain = body + _checksum(body)
    return MintedKey(plain=Secret(plain), key_id=key_id, secret_hash=hash_secret(secret), last4=plain[-4:])


def parse(text: str) -> ParsedKey:
    """Read a presented key. Raises MalformedKeyError on a wrong shape or checksum."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise MalformedKeyError("not an API key of this service")
    key_id, secret, checksum = match.groups()
    if _checksum(text[:-CHECKSUM_DIGITS]) != checksum:
        raise MalformedKeyError("the API key's checksum is wrong; it was cut off or mistyped")
    return ParsedKey(key_id=key_id, secret_hash=hash_secret(secret))


def verify(parsed: ParsedKey, grant: KeyGrant) -> bool:
    """Whether `parsed` proves possession of `grant`'s secret, in constant time. Says nothing of revocation."""
    return hmac.compare_digest(parsed.secret_hash, grant.secret_hash)


def hash_secret(secret: str) -> bytes:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def _checksum(body: str) -> str:
    rest, low = divmod(zlib.crc32(body.encode()), len(_PAIRS))
    high, middle = divmod(rest, len(_PAIRS))
    return _PAIRS[high] + _PAIRS[middle] + _PAIRS[low]


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, len(DIGITS))
        digits.append(DIGITS[digit])
    return "".join(reversed(digits))
