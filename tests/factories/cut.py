"""A TCP relay that a test can cut: what is behind it is then away for whoever goes through it, and for nobody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.engine import make_url


class Cut:
    """Relays to a server until `cut`; `mend` lets new connections through again."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        self._open = False
        for writer in list(self._writers):
            writer.transport.abort()

    def mend(self) -> None:
        self._open = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, there_writer}
        try:
            await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))
        finally:
            self._writers -= {writer, there_writer}
            for each in (writer, there_writer):
                each.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def cuttable(database_url: str) -> AsyncIterator[tuple[Cut, str]]:
    """A relay before a database, and the URL that leads through it."""
    parts = make_url(database_url)
    cut = Cut(parts.host or "127.0.0.1", parts.port or 5432)
    server = await asyncio.start_server(cut.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield cut, parts.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
    finally:
        server.close()
        cut.cut()
        await server.wait_closed()
