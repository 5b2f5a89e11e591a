"""Asking the store that all gateways share, and hearing that it is away.

Layer: service. One call waits no longer than its deadline; after a failure the next calls are not made for a while
(`circuit`). It never decides what silence means.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisAwayError
from redis.exceptions import TimeoutError as RedisTimeoutError

from controlplane.admission import scripts, wire
from controlplane.admission.circuit import Circuit
from controlplane.admission.patience import Patience, slices_of
from controlplane.admission.tally import Tally

_AWAY = (
    RedisAwayError,
    RedisTimeoutError,
    ReadOnlyError,
    OutOfMemoryError,
    ClusterDownError,
    MasterDownError,
    TryAgainError,
    OSError,
)
_TAKES_NOTHING = ("NOREPLICAS", "MISCONF", "BUSY")
"""How a store refuses that takes no writes now: too few replicas, a disk that is full, a script that does not end."""


class Silence(enum.Enum):
    """Why there is no answer."""

    NOT_ASKED = enum.auto()
    NOT_ANSWERED = enum.auto()


class Store:
    """The scripts `lua` by name. `on_heard` is told of every answer: the tenant, the answer, and whether the store had
    been away before it.
    """

    def __init__(
        self,
        lua: Mapping[str, scripts.Script],
        *,
        deadline_s: float,
        monotonic: Callable[[], float],
        tally: Tally,
        on_heard: Callable[[str, list[Any], bool], None],
    ) -> None:
        self._lua = lua
        self._slices = slices_of(deadline_s)
        self._circuit = Circuit(monotonic)
        self._tally = tally
        self._on_heard = on_heard

    @property
    def is_away(self) -> bool:
        """It failed to answer and has not answered since."""
        return self._circuit.is_open

    async def ask(self, name: str, tenant_id: str, counters: Sequence[str], words: list[Any]) -> list[Any] | Silence:
        """The script's answer about the tenant and these counters. Raises ResponseError for what is no answer, and
        what cancelled it.
        """
        if not self._circuit.allow():
            self._tally.not_asked += 1
            return Silence.NOT_ASKED
        try:
            async with Patience(self._slices):
                packed = await self._lua[name](keys=wire.keys(tenant_id, counters), args=[wire.encode(words)])
            answer = wire.decode(packed)
        except _AWAY:
            return self._unanswered()
        except ResponseError as error:
            if str(error).startswith(_TAKES_NOTHING):
                return self._unanswered()
            self._circuit.abandoned()
            raise
        except msgspec.DecodeError as error:
            self._circuit.abandoned()
            raise ResponseError("the store's answer cannot be read") from error
        except BaseException:
            self._circuit.abandoned()
            raise
        self._on_heard(tenant_id, answer, self._circuit.succeeded())
        return answer

    def _unanswered(self) -> Silence:
        self._tally.not_answered += 1
        self._circuit.failed()
        return Silence.NOT_ANSWERED
