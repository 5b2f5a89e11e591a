"""Rows of the ledger as CSV or Parquet, page by page: memory is bounded whatever the span.

Layer: service. Each page is a short transaction of its own, so a slow reader holds no connection. Rows come oldest
first; what is stored behind the reader's place while it reads is not in this export.
"""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.db import transaction
from controlplane.errors import InvalidRequestError
from controlplane.ledger import service
from controlplane.ledger.schemas import ExportFormat, UsageLine

PAGE = 5_000
"""Rows held at once; one row group of Parquet."""
COLUMNS = UsageLine.__struct_fields__
MEDIA_TYPES = {ExportFormat.CSV: "text/csv; charset=utf-8", ExportFormat.PARQUET: "application/vnd.apache.parquet"}

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What spreadsheets take for the beginning of a formula."""
_TIMES = ("started_at", "finished_at")
_WHOLE = ("boot_epoch", "prompt_tokens", "cached_tokens", "uncached_tokens", "output_tokens", "cost")
_FLOATS = ("kv_block_seconds", "device_seconds")


def export(
    engine: AsyncEngine,
    file_format: ExportFormat,
    *,
    since: datetime,
    until: datetime,
    tenant: str | None,
    page: int = PAGE,
) -> AsyncIterator[bytes]:
    """The file's bytes. Raises InvalidRequestError before the first of them: for an impossible span, and for Parquet
    where its library is not installed.
    """
    service.require_span(since, until)
    pages = _pages(engine, since, until, tenant, page)
    if file_format is ExportFormat.CSV:
        return _csv(pages)
    if find_spec("pyarrow") is None:
        raise InvalidRequestError(
            "this control plane cannot write Parquet: install tidegate[parquet], or ask for csv", param="format"
        )
    return _parquet(pages)


async def _pages(
    engine: AsyncEngine, since: datetime, until: datetime, tenant: str | None, size: int
) -> AsyncIterator[Sequence[UsageLine]]:
    last: UsageLine | None = None
    while True:
        async with transaction(engine) as session:
            rows = await service.rows_after(session, since=since, until=until, tenant=tenant, last=last, limit=size)
        if rows:
            yield rows
        if len(rows) < size:
            return
        last = rows[-1]


async def _csv(pages: AsyncIterator[Sequence[UsageLine]]) -> AsyncIterator[bytes]:
    yield _csv_lines([COLUMNS])
    async for rows in pages:
        yield await asyncio.to_thread(_csv_lines, ([_cell(getattr(row, name)) for name in COLUMNS] for row in rows))


def _csv_lines(rows: Iterable[Iterable[object]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer).writerows(rows)
    return buffer.getvalue().encode()


def _cell(value: object) -> object:
    """Text as a spreadsheet shows it: never run as a formula."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


async def _parquet(pages: AsyncIterator[Sequence[UsageLine]]) -> AsyncIterator[bytes]:
    import pyarrow
    from pyarrow import parquet

    kinds = {
        **dict.fromkeys(_TIMES, pyarrow.timestamp("us", tz="UTC")),
        **dict.fromkeys(_WHOLE, pyarrow.int64()),
        **dict.fromkeys(_FLOATS, pyarrow.float64()),
    }
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in COLUMNS])
    sink = _Sink()

    def write(rows: Sequence[UsageLine]) -> None:
        columns = {name: [_plain(getattr(row, name)) for row in rows] for name in COLUMNS}
        writer.write_table(pyarrow.table(columns, schema=schema))

    writer = parquet.ParquetWriter(sink, schema)
    async for rows in pages:
        await asyncio.to_thread(write, rows)
        yield sink.take()
    await asyncio.to_thread(writer.close)
    yield sink.take()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


class _Sink(io.RawIOBase):
    """A file that is only written to, and gives away what it has."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._written += len(part)
        return len(part)

    def tell(self) -> int:
        return self._written

    def take(self) -> bytes:
        taken, self._parts = b"".join(self._parts), []
        return taken
