"""Which port to listen on.

Layer: service. granian opens its port with SO_REUSEPORT, so that two servers would silently share one; this looks
first, without that flag.
"""

from __future__ import annotations

import socket


def free_port(host: str, port: int) -> int:
    """`port` when nobody listens on it, or a free one for 0. Raises OSError when it is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A port whose last connections are still winding down is free; one with a listener is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
