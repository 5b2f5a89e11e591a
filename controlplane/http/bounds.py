"""What a client may send and how long it may take, before any application sees its request.

Layer: kernel. Numbers only.
"""

HEAD_BYTES = 64 * 1024
"""Request line and headers together, to within one read of the socket (256 KiB)."""

HEAD_S = 30.0
"""A request's head, once begun, and a new connection's first."""

IDLE_S = 75.0
"""A connection between two requests."""

REST_BYTES = 64 * 1024
"""Of a body whose request has had its answer: read and dropped, so that the client sees it."""

STALLED_S = 60.0
"""A client that takes nothing of an answer which waits for it."""

STOP_S = 5.0
"""After this a server that stops waits for no request and no client."""

BACKLOG = 2048
"""Connections that wait to be taken."""
