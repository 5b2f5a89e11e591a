"""HTTP by hand: an answer as the bytes that came."""

from __future__ import annotations

import socket


def exchange(port: int, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of one answer, read until nothing more comes."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(request)
        received = b""
        while not complete(received):
            data = connection.recv(65536)
            assert data, f"closed after {received!r}"
            received += data
    head, _, rest = received.partition(b"\r\n\r\n")
    return head, rest


def complete(received: bytes) -> bool:
    head, found, rest = received.partition(b"\r\n\r\n")
    if not found:
        return False
    if b"chunked" in head:
        return rest.endswith(b"\r\n0\r\n\r\n")
    return len(rest) == int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])


def chunks(body: bytes) -> list[bytes]:
    found = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        found.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        body = rest[length + 2 :]
    return found
