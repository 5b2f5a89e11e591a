"""What every message between processes is: its base and its schema's version.

Layer: service. `protocol` hands both on, and says how messages may change.
"""

from __future__ import annotations

import msgspec

SCHEMA_VERSION = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every wire struct: immutable, keyword-only, defaults left off the wire."""
