"""What a client asks of a request's place in line: a priority, a class, and how long its first token is of use.

Layer: service. Pure. Read from the headers `x-priority`, `x-service-class` and `x-deadline-ms`; none of them reaches a
replica. A client may put itself back, never forward: its priority is bounded by the key's grant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from controlplane.admission.bands import Band, band_of
from controlplane.errors import InvalidRequestError

PRIORITY = b"x-priority"
SERVICE_CLASS = b"x-service-class"
DEADLINE = b"x-deadline-ms"
HEADERS = frozenset({PRIORITY, SERVICE_CLASS, DEADLINE})
LOWEST_PRIORITY = 100
LONGEST_DEADLINE_MS = 3_600_000

_PRIORITY = re.compile(rb"-?\d{1,3}")
_CLASS = re.compile(rb"[a-z0-9-]{1,40}")
_DEADLINE = re.compile(rb"\d{1,7}")


class Wish(msgspec.Struct, frozen=True, gc=False):
    """`priority` counts as in the engine's queue, lower first. `service_class` names the objectives that hold, by
    default the band's name. `deadline_s` is from the request's arrival to its first token, None for no deadline.
    """

    priority: int
    band: Band
    service_class: str
    deadline_s: float | None = None


def read_wish(headers: Mapping[bytes, bytes], granted: int) -> Wish:
    """What `headers` ask for within the `granted` priority. Raises InvalidRequestError (400) naming the header."""
    if not headers:
        band = band_of(granted)
        return Wish(granted, band, band.name.lower())
    raw = headers.get(PRIORITY)
    priority = granted
    if raw is not None:
        asked = int(raw) if _PRIORITY.fullmatch(raw) else LOWEST_PRIORITY + 1
        if not -LOWEST_PRIORITY <= asked <= LOWEST_PRIORITY:
            raise _invalid(PRIORITY, f"a whole number from -{LOWEST_PRIORITY} to {LOWEST_PRIORITY}")
        priority = max(granted, asked)
    band = band_of(priority)
    name = headers.get(SERVICE_CLASS, band.name.lower().encode())
    if not _CLASS.fullmatch(name):
        raise _invalid(SERVICE_CLASS, "1 to 40 lower-case letters, digits and hyphens")
    deadline = headers.get(DEADLINE)
    if deadline is None:
        return Wish(priority, band, name.decode())
    if not _DEADLINE.fullmatch(deadline) or not 1 <= int(deadline) <= LONGEST_DEADLINE_MS:
        raise _invalid(DEADLINE, f"a whole number of milliseconds from 1 to {LONGEST_DEADLINE_MS}")
    return Wish(priority, band, name.decode(), int(deadline) / 1000)


def _invalid(header: bytes, wanted: str) -> InvalidRequestError:
    name = header.decode()
    return InvalidRequestError(f"The header {name} must be {wanted}.", code="invalid_header", param=name)
