"""Label values of metrics come from the registry of tenants and models, never from a request (F32).

Layer: service. Pure and bounded: a name nobody registered reads "other", so junk names add no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

OTHER = "other"
MAX_KNOWN = 2_000
"""Names of one kind that get a series of their own; the rest share "other"."""


class KnownLabels:
    """The tenants and models that may be label values. `on_unknown` is called when a name is asked for that is not."""

    def __init__(self, on_unknown: Callable[[], None] = lambda: None) -> None:
        self.on_unknown = on_unknown
        self._tenants: frozenset[str] = frozenset()
        self._models: frozenset[str] = frozenset()

    def learn(self, *, tenants: Iterable[str], models: Iterable[str]) -> None:
        """Replace what is known by the first `MAX_KNOWN` names of each."""
        self._tenants = frozenset(islice(tenants, MAX_KNOWN))
        self._models = frozenset(islice(models, MAX_KNOWN))

    def tenant(self, slug: str) -> str:
        """`slug` if it is a tenant's, else "other"."""
        return self._label(slug, self._tenants)

    def model(self, name: str) -> str:
        """`name` if a pool serves it, else "other"."""
        return self._label(name, self._models)

    def _label(self, name: str, known: frozenset[str]) -> str:
        if name in known:
            return name
        self.on_unknown()
        return OTHER
