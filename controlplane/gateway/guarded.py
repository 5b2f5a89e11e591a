"""Addresses as the gateway's connections get them: judged at the moment of connecting.

Layer: service. The HTTP client connects to what this says and asks nobody else in between, so a name that meant
something harmless when its replica registered gains nothing by meaning something else now (F34).
"""

from __future__ import annotations

from controlplane.egress import EgressPolicy, Target, TargetRefusedError
from controlplane.fleet.addresses import Resolve, resolve


class AddressRefusedError(Exception):
    """A replica's URL leads where no gateway connects to."""


class GuardedAddresses:
    """The system's resolver behind an egress policy."""

    def __init__(self, policy: EgressPolicy, *, resolve: Resolve = resolve) -> None:
        self._policy = policy
        self._resolve = resolve

    async def of(self, target: Target) -> tuple[str, ...]:
        """Where to connect to. Raises AddressRefusedError, or OSError when a name has no address."""
        try:
            if target.address is not None:
                self._policy.require(target.address)
                return (str(target.address),)
            found = self._policy.require_all(target.host, await self._resolve(target.host))
        except TargetRefusedError as refused:
            raise AddressRefusedError(str(refused)) from None
        return tuple(map(str, found))
