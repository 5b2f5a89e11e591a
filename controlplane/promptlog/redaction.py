"""Taking out of a text what must not be kept: addresses, cards, secrets, phone numbers, and what a tenant names.

Layer: service. Pure. Every pattern is a bounded number of characters, so the time is linear in the text's length
whatever it holds; a tenant gives templates ("EMP-######"), never regular expressions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import msgspec

from controlplane.tenants.schemas import Redaction

LONGEST_MATCH = 8_192
"""No pattern of a rule matches more characters: a text cut that much later than wanted is redacted up to its end."""

TEMPLATE = re.compile(r"[ -~]{3,64}")
_CLASSES = {"#": "[0-9]", "@": "[A-Za-z]", "?": "[A-Za-z0-9]"}

_EMAIL = r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,4}[A-Za-z]{2,24}"
_CARD = r"(?<![0-9])(?=([0-9]{4}(?:[ -]?[0-9]){9,15})(?![0-9]))"
"""Looked for at every beginning of a number, because what stands before a card may look like its first digits. Cards
are printed in groups of which the first has four."""
_PHONE = (
    r"(?<![A-Za-z0-9+])(?:\+|00|\(?0)[0-9](?:[ ()./-]{0,2}[0-9]){6,13}(?![0-9])"
    r"|(?<![A-Za-z0-9+.-])(?:1[ .-])?(?:\([2-9][0-9]{2}\)[ .-]?|[2-9][0-9]{2}[ .-])"
    r"[2-9][0-9]{2}[ .-][0-9]{4}(?![0-9]|[.-][0-9])"
)
"""With a country's or an area's prefix; or in the groups of the North American plan (NANPA: NXX-NXX-XXXX), which has
none."""
_CREDENTIAL = (
    r"\btga?_[0-9A-Za-z_]{6,120}"
    r"|\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,200}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,100}|\bgithub_pat_[A-Za-z0-9_]{20,120}|\bglpat-[A-Za-z0-9_-]{16,60}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,120}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{35}"
    r"|\bhf_[A-Za-z0-9]{20,60}"
    r"|\beyJ[A-Za-z0-9_-]{8,1000}\.[A-Za-z0-9_-]{4,4000}\.[A-Za-z0-9_-]{0,1000}"
    r"|(?i:\bbearer [A-Za-z0-9._~+/=-]{8,400})"
    r"|(?i:\b(?:password|passwd|secret|api[_-]?key|access[_-]?token)\b[\"']?[ ]?[:=][ ]?[\"']?)[^\s\"',;&]{3,200}"
    r"|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[A-Za-z0-9+/=\s\\]{0,6000}"
)
_DATA_URL = re.compile(
    r"(?i:\bdata:(?:([a-z]{1,20})/[a-z0-9.+-]{1,80})?(?:;[a-z0-9-]{1,40}=[\"'a-z0-9._+-]{1,80}){0,4};base64,)"
    r"[A-Za-z0-9+/_=%-]*(?:\r?\n[A-Za-z0-9+/_=]{40,})*"
)
"""Bytes in a text: nothing in them can be seen, so that they are never kept. It has no longest match, but begins with
one of a few letters, and what it has matched is not looked at again."""
_MEDIA = frozenset({"image", "audio", "video"})
_BUILT_IN = {
    # secrets first: a key may hold what looks like an address or a number
    Redaction.SECRETS: _CREDENTIAL,
    Redaction.EMAILS: _EMAIL,
    Redaction.CARDS: _CARD,
    Redaction.PHONES: _PHONE,
}


_SPELLED = re.compile(
    r"\\{1,8}(?:u([0-9A-Fa-f]{4})|([bfnrt\"'/]))"
    "|[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
"""A character as JSON in a string spells it, once or several times over (arguments of calls are JSON in text), or an
invisible one."""
_CONTROLS = dict(zip("bfnrt", "\b\f\n\r\t", strict=True))
_DASHES = frozenset("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d")


class Redacted(msgspec.Struct, frozen=True):
    """What is kept of a text. `replaced` counts what was taken out, `cut` says that the end is missing."""

    text: str
    replaced: int
    cut: bool


def check_template(template: str) -> str:
    """`template` when it can be one: 3 to 64 printable ASCII characters, of which at least two are no spaces.

    `#` is a digit, `@` a letter, `?` either; all else is itself. Raises ValueError.
    """
    if not TEMPLATE.fullmatch(template) or len(template.replace(" ", "")) < 2:
        raise ValueError("a template is 3 to 64 printable characters: # is a digit, @ a letter, ? either")
    return template


class Redactor:
    """Compiled rules of one tenant. Raises ValueError for a template that is none.

    Whatever its rules, a data URL's bytes are replaced by their kind: image, audio, video or file.
    """

    def __init__(self, kinds: Iterable[Redaction], templates: Iterable[str] = ()) -> None:
        wanted = set(kinds)
        self._patterns = [
            (kind.value.removesuffix("s"), re.compile(pattern)) for kind, pattern in _BUILT_IN.items() if kind in wanted
        ]
        own = [_compiled(check_template(template)) for template in templates]
        if own:
            self._patterns.insert(0, ("redacted", re.compile("|".join(own), re.IGNORECASE)))

    def redact(self, text: str, limit: int) -> Redacted:
        """`text` up to `limit` characters of the original, without what the rules find in them."""
        part = text[: limit + LONGEST_MATCH]
        spans = _merged([*self._spans(part), *self._spelled(part)])
        pieces: list[str] = []
        at = replaced = 0
        for start, end, name in spans:
            if start >= limit:
                break
            pieces += (part[at:start], f"[{name}]")
            at, replaced = end, replaced + 1
        pieces.append(part[at : max(at, limit)])
        return Redacted("".join(pieces), replaced, len(text) > limit)

    def _spelled(self, text: str) -> Iterator[tuple[int, int, str]]:
        """What the rules find in `text` once every character is spelled as they know it."""
        plain, places = _plain(text)
        if plain != text:
            yield from ((places[start], places[end], name) for start, end, name in self._spans(plain))

    def _spans(self, text: str) -> Iterator[tuple[int, int, str]]:
        for found in _DATA_URL.finditer(text):
            kind = (found.group(1) or "").lower()
            yield found.start(), found.end(), kind if kind in _MEDIA else "file"
        for name, pattern in self._patterns:
            for found in pattern.finditer(text):
                if name != "card":
                    yield found.start(), found.end(), name
                elif length := _card_length(found.group(1)):
                    yield found.start(), found.start() + length, name


def _plain(text: str) -> tuple[str, Sequence[int]]:
    """`text` with escapes resolved, digits, letters, blanks and dashes of all scripts as in ASCII where they have such
    a form, and without what is invisible; and for each place in that, and its end, the one in `text`.
    """
    if text.isascii() and "\\" not in text:
        return text, range(len(text) + 1)
    forms = {ord(one): _folded(one) for one in set(text) if not one.isascii()}
    folded = text.translate(forms) if forms else text
    pieces: list[str] = []
    places: list[int] = []
    at = 0
    for found in _SPELLED.finditer(folded):
        pieces.append(folded[at : found.start()])
        places.extend(range(at, found.start()))
        at = found.end()
        code, short = found.groups()
        character = _folded(chr(int(code, 16))) if code else _CONTROLS.get(short, short or "")
        if character and not _SPELLED.match(character):
            pieces.append(character)
            places.append(found.start())
    pieces.append(folded[at:])
    places.extend(range(at, len(folded) + 1))
    return "".join(pieces), places


@lru_cache(4_096)
def _folded(character: str) -> str:
    """The ASCII character for `character` where it has such a form, else itself."""
    if character in _DASHES:
        return "-"
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    form = unicodedata.normalize("NFKC", character)
    return form if len(form) == 1 and form.isascii() else character


def _card_length(text: str) -> int:
    """Characters of the longest card number that `text` begins with and that ends where a group of digits does."""
    for end in range(len(text), 12, -1):
        if text[end - 1].isdigit() and (end == len(text) or not text[end].isdigit()):
            digits = text[:end].replace(" ", "").replace("-", "")
            if len(digits) >= 13 and luhn(digits):
                return end
    return 0


def luhn(digits: str) -> bool:
    """Whether the last of `digits` is the check digit of a payment card."""
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        doubled = digit * 2 if place % 2 else digit
        total += doubled - 9 if doubled > 9 else doubled
    return total % 10 == 0


def _compiled(template: str) -> str:
    return "".join(_CLASSES.get(character, re.escape(character)) for character in template)


def _merged(spans: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Spans in order, those that overlap as one with the first one's name."""
    merged: list[tuple[int, int, str]] = []
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        if merged and start < merged[-1][1]:
            before = merged[-1]
            merged[-1] = (before[0], max(before[1], end), before[2])
        else:
            merged.append((start, end, name))
    return merged
