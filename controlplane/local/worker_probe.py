"""Whether the Celery worker answers.

Layer: service. Asks over the broker, as `celery inspect ping` does.
"""

from __future__ import annotations

from typing import Any

from controlplane.settings import Secret

WAIT_S = 0.5


class WorkerProbe:
    """One call is one attempt."""

    def __init__(self, broker: Secret) -> None:
        self._broker = broker
        self._app: Any = None

    def __call__(self) -> bool:
        if self._app is None:
            from celery import Celery

            self._app = Celery("probe", broker=self._broker.reveal())
        from kombu.exceptions import OperationalError
        from redis.exceptions import RedisError

        try:
            return bool(self._app.control.ping(timeout=WAIT_S, limit=1))
        except (OperationalError, RedisError, OSError):  # away, or there and refusing to write (a full disk)
            return False
