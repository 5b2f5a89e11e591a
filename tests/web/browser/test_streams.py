"""Event streams over real sockets: browsers that come and go leave the server's process as it was (F37)."""

from __future__ import annotations

import re
import socket
import time

import httpx
import psutil
import pytest
from sqlalchemy.engine import make_url

from tests.factories.rows import PASSWORD
from tests.web.browser.conftest import OPERATOR, Site


def cookies(site: Site) -> str:
    with httpx.Client(base_url=site.url) as client:
        token = re.search(r'_csrf_token" value="([^"]+)"', client.get("/login").text)
        assert token is not None
        form = {"email": OPERATOR, "password": PASSWORD, "_csrf_token": token.group(1)}
        assert client.post("/login", data=form).status_code == 303
        return "; ".join(f"{name}={value}" for name, value in client.cookies.items())


def opened(site: Site, cookie: str) -> socket.socket:
    """A stream that has sent its first event."""
    address = make_url(site.url)
    assert address.host is not None
    connection = socket.create_connection((address.host, address.port or 80), timeout=20)
    request = f"GET /events/overview?window=60 HTTP/1.1\r\nhost: {address.host}\r\ncookie: {cookie}\r\n\r\n"
    connection.sendall(request.encode())
    received = b""
    while b"event: status" not in received:
        chunk = connection.recv(65536)
        assert chunk, received[:300]
        received += chunk
    return connection


def descriptors(site: Site) -> int:
    server = psutil.Process(site.pid)
    return sum(process.num_fds() for process in [server, *server.children(recursive=True)])


def waves(site: Site, cycles: int, together: int = 20) -> None:
    """Opens `together` streams at a time and closes them; a first wave fills the server's pools."""
    cookie = cookies(site)

    def wave() -> int:
        connections = [opened(site, cookie) for _ in range(together)]
        busy = descriptors(site)
        for connection in connections:
            connection.close()
        return busy

    limit = wave() - together
    for _ in range(cycles // together):
        wave()
    deadline = time.monotonic() + 20
    while descriptors(site) > limit and time.monotonic() < deadline:
        time.sleep(0.1)
    assert descriptors(site) <= limit


def test_f37_streams_over_real_sockets_leave_no_descriptor(site: Site) -> None:
    waves(site, 100)


@pytest.mark.slow
def test_f37_two_thousand_streams_over_real_sockets_leave_no_descriptor(site: Site) -> None:
    waves(site, 2000)
