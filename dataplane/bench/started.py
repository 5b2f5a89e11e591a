"""What a bench starts and must never leave behind.

Layer: service. It holds no process itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Started(ABC):
    """A context manager that is stopped when it is left, also when starting it broke off half way."""

    @abstractmethod
    def _start(self) -> None:
        """Start it, and wait until it is ready."""

    @abstractmethod
    def stop(self) -> None:
        """Stop whatever was started, which may be nothing or a part."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
