"""Where a replica says it is, judged when it registers and again by every gateway that connects.

Layer: service. Resolves names; the rules are `controlplane.egress`. It stores nothing: a gateway judges the addresses
it is about to connect to, so what a name means later cannot differ from what was judged (F34).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from controlplane.egress import EgressPolicy, Target, TargetRefusedError, parse_networks, parse_target
from controlplane.settings import Settings

FRESH_S = 10.0
"""A name that was found good is good this long: replicas report every second."""
RESOLVE_S = 2.0
RESOLVING = 8
"""Names resolved at once; the system's resolver blocks a thread each."""
MAX_KNOWN = 4_096

Resolve = Callable[[str], Awaitable[list[str]]]


def replica_policy(settings: Settings) -> EgressPolicy:
    """Replicas are in the networks of the setting and nowhere else: gateways send them prompts and our own token."""
    return EgressPolicy(parse_networks(settings.replica_networks))


async def resolve(host: str) -> list[str]:
    """All addresses of a name, by the system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class ReplicaAddresses:
    """Says of a URL whether a replica may be there."""

    def __init__(
        self, policy: EgressPolicy, *, resolve: Resolve = resolve, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._resolve = resolve
        self._clock = clock
        self._good_until: OrderedDict[str, float] = OrderedDict()
        self._turn = asyncio.Semaphore(RESOLVING)

    async def require(self, url: str) -> None:
        """Raises TargetRefusedError for a URL that no gateway would connect to."""
        target = parse_target(url)
        if target.address is not None:
            self._policy.require(target.address)
        elif self._good_until.get(target.host, 0.0) <= self._clock():
            await self._look_up(target)

    async def _look_up(self, target: Target) -> None:
        try:
            async with asyncio.timeout(RESOLVE_S), self._turn:
                addresses = await self._resolve(target.host)
        except (OSError, TimeoutError):
            raise TargetRefusedError(f"the name {target.host} cannot be resolved") from None
        self._policy.require_all(target.host, addresses)
        self._good_until[target.host] = self._clock() + FRESH_S
        self._good_until.move_to_end(target.host)
        if len(self._good_until) > MAX_KNOWN:
            self._good_until.popitem(last=False)
