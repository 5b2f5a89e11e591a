"""A start is over only when the gateway would send a request to the replica that was started."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from controlplane.local.route_probe import RouteProbe
from controlplane.settings import Secret

OURS = "http://127.0.0.1:7310"


@contextmanager
def served(rows: object, metrics: str, status: int = 200) -> Iterator[str]:
    """A control plane and gateway that answer just this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = {"/api/v1/replicas": "Bearer operator", "/metrics": "Bearer scraper"}[self.path]
            right = self.headers["Authorization"] == wanted
            body = (json.dumps(rows) if self.path.startswith("/api") else metrics).encode()
            self.send_response(status if right else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def probe(url: str) -> str | None:
    return RouteProbe(
        control_url=url,
        gateway_url=url,
        replica_url=OURS,
        api_token=Secret("operator"),
        metrics_token=Secret("scraper"),
    )()


@pytest.mark.parametrize(
    ("rows", "metrics", "status", "expected"),
    [
        ([{"url": OURS, "state": "ready"}], "tidegate_gateway_ready_replicas 1.0\n", 200, "knows the replica"),
        ([{"url": OURS, "state": "ready"}], "tidegate_gateway_ready_replicas 0.0\n", 200, None),
        ([{"url": OURS, "state": "starting"}], "tidegate_gateway_ready_replicas 1.0\n", 200, None),
        ([{"url": "http://127.0.0.1:1", "state": "ready"}], "tidegate_gateway_ready_replicas 1.0\n", 200, None),
        ([{"url": OURS, "state": "draining"}], "tidegate_gateway_ready_replicas 0.0\n", 200, "drained"),
        ([], "", 200, None),
        ({"error": {}}, "", 503, None),
    ],
    ids=["routed", "not heard of", "starting", "row of an earlier run", "drained", "no report yet", "away"],
)
def test_what_counts_as_routed(rows: object, metrics: str, status: int, expected: str | None) -> None:
    with served(rows, metrics, status) as url:
        seen = probe(url)
    assert (seen is None) if expected is None else (seen is not None and expected in seen)


def test_nobody_there_is_no_route() -> None:
    assert probe("http://127.0.0.1:1") is None
