"""A TCP relay that can be cut: how a test takes Postgres or Redis away from a process and gives it back."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Cut:
    """Relays `port` on loopback to `target`; while cut, connections are reset and new ones refused."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = self._listen(0)
        self.port = int(self._listener.getsockname()[1])

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._open |= {near, far}
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        self._end(source)
        self._end(sink)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def cut(self) -> None:
        """Take the target away."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            self._end(connection)

    def mend(self) -> None:
        """Give it back, at the same port."""
        self._listener = self._listen(self.port)
