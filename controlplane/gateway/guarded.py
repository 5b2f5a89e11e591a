"""Addresses as the gateway's connections get them: judged at the moment of connecting.

Layer: service. The HTTP client connects to what this resolver returns and asks nobody else in between, so a name that
meant something harmless when its replica registered gains nothing by meaning something else now (F34).
"""

from __future__ import annotations

import socket

from aiohttp.abc import AbstractResolver, ResolveResult

from controlplane.egress import EgressPolicy, TargetRefusedError
from controlplane.fleet.addresses import Resolve, resolve


class AddressRefusedError(OSError):
    """A replica's name leads where no gateway connects to."""


class GuardedResolver(AbstractResolver):
    """The system's resolver behind an egress policy."""

    def __init__(self, policy: EgressPolicy, *, resolve: Resolve = resolve) -> None:
        self._policy = policy
        self._resolve = resolve

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises AddressRefusedError, or OSError when the name has no address."""
        try:
            addresses = self._policy.require_all(host, await self._resolve(host))
        except TargetRefusedError as refused:
            raise AddressRefusedError(str(refused)) from None
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET6 if address.version == 6 else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Holds nothing."""
