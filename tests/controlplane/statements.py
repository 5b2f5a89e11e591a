"""Statements that a test causes itself, for pages that must cost the same however much there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

_counting: ContextVar[bool] = ContextVar("counting", default=False)


@contextmanager
def counted_queries(engine: AsyncEngine) -> Iterator[list[str]]:
    """Statements of what this test awaits; those of background tasks are not its own."""
    statements: list[str] = []

    def note(conn: object, cursor: object, statement: str, *rest: object) -> None:
        if _counting.get():
            statements.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    token = _counting.set(True)
    try:
        yield statements
    finally:
        _counting.reset(token)
        event.remove(engine.sync_engine, "before_cursor_execute", note)
