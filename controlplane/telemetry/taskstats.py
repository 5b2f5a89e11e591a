"""How often background jobs ran, ended and failed, counted over all workers.

Layer: service. Workers have no port of their own, so they count in Redis, which outlives them: the numbers only
grow, whatever is restarted (F28). Best effort: a job never fails because it could not be counted. Names read back
become label values, so only what can be a job's name is read, and only so many (F32).
"""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

log = logging.getLogger("tidegate.worker")

KEY = "tidegate:tasks"
OUTCOMES = ("done", "failed", "retried")
_SECONDS = "seconds"
NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
MAX_TASKS = 200


class TaskCount(NamedTuple):
    """One task's runs by outcome, and their seconds in all."""

    task: str
    done: float = 0.0
    failed: float = 0.0
    retried: float = 0.0
    seconds: float = 0.0


class TaskStats:
    """Reads and writes the counts."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def count(self, task: str, outcome: str, seconds: float) -> None:
        """Add one run. `task` is a registered task's name, `outcome` one of `OUTCOMES`."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hincrby(KEY, f"{task} {outcome}", 1)
        pipeline.hincrbyfloat(KEY, f"{task} {_SECONDS}", seconds)
        try:
            await pipeline.execute()
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("a run of %s was not counted: %s", task, type(error).__name__)

    async def read(self) -> list[TaskCount]:
        """All tasks' counts, by name. Raises RedisError."""
        found: dict[str, dict[str, float]] = {}
        for field, value in (await self._redis.hgetall(KEY)).items():
            task, _, name = _text(field).rpartition(" ")
            if name in (*OUTCOMES, _SECONDS) and NAME.fullmatch(task):
                found.setdefault(task, {})[name] = float(value)
        return [TaskCount(task, **counts) for task, counts in sorted(found.items())[:MAX_TASKS]]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
