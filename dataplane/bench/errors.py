"""What can go wrong with a bench, each said in one sentence.

Layer: service. Plain data.
"""

from __future__ import annotations


class BenchError(Exception):
    """Ends what was being measured; the message is one sentence."""


class NotToBeHadError(BenchError):
    """A peer cannot be installed or does not take this model; the others go on."""


class SideError(BenchError):
    """A server did not do what was asked of it while it was measured: its figures would be worth nothing."""


class CaseError(BenchError):
    """Two results were not measured in the same case."""
