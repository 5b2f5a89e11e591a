"""Overviews and reports as tests need them: an Overview straight, or reports that make the real service compute one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from controlplane.evidence import Evidence, EvidenceKind
from controlplane.telemetry.schemas import Figures, Overview, Quantiles, Series
from dataplane.protocol import (
    WINDOW_SECONDS,
    CoreReady,
    Counters,
    GatewayCounters,
    GatewayWindow,
    Gauges,
    MemoryCounters,
    ReplicaState,
    ServiceCounters,
    Window,
    encode,
)
from tests.controlplane.telemetry import reports

POOL = "small"
MODEL = "small-model"
NOTHING = Quantiles(n=0)
EMPTY = Figures(ttft=NOTHING, ttft_visible=NOTHING, tpot=NOTHING, e2e=NOTHING, engine_ttft=NOTHING, engine_tpot=NOTHING)


def evidence(value: float, unit: str = "s", **rest: object) -> Evidence:
    return Evidence(value=value, unit=unit, kind=EvidenceKind.OBSERVED, source="test", **rest)  # type: ignore[arg-type]


def quantiles(n: int, p50: float, p95: float, p99: float) -> Quantiles:
    return Quantiles(n=n, p50=evidence(p50), p95=evidence(p95), p99=evidence(p99))


def series(values: list[float | None], start: int = 1_789_999_700) -> Series:
    """All columns alike."""
    at = [start + WINDOW_SECONDS * i for i in range(len(values))]
    return Series(at=at, **{name: values for name in Series.__struct_fields__ if name != "at"})


def an_overview(figures: Figures = EMPTY, **rest: object) -> Overview:
    """Live as of `as_of`, with nothing observed unless told otherwise."""
    now = 1_790_000_000.0
    values: dict[str, object] = {
        "as_of": now,
        "window_s": 300,
        "last_report_at": now - 0.5,
        "total": figures,
        "by_replica": [],
        "by_tenant": [],
        "series": series([None] * 30),
    }
    return Overview(**{**values, **rest})  # type: ignore[arg-type]


class Reporter:
    """One replica and one gateway that report to a control plane, as the real ones do."""

    def __init__(self, url: str, token: str, replica: str = "replica-1", tenant: str = "acme") -> None:
        self._client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=10)
        self._replica = replica
        self._tenant = tenant
        self._sequence = 0
        self._lock = threading.Lock()
        self._epoch = time.time_ns() // 1_000_000
        self._gateway: dict[int, GatewayCounters] = {}
        self._engine: dict[int, Counters] = {}

    def serve(self, *, ttft: float, engine_ttft: float, tpot: float, requests: int = 1, finish: str = "stop") -> None:
        """Count `requests` that ended just now."""
        start = int(time.time()) // WINDOW_SECONDS * WINDOW_SECONDS
        self._gateway.setdefault(start, GatewayCounters()).merge(
            reports.counters(
                accepted=requests,
                finish=finish,
                prompt=100 * requests,
                cached=40 * requests,
                output=20 * requests,
                ttft=[ttft] * requests,
                ttft_visible=reports.histogram([ttft] * requests),
                tpot=[tpot] * requests,
                e2e=reports.histogram([ttft + 19 * tpot] * requests),
            )
        )
        self._engine.setdefault(start, Counters()).merge(
            Counters(
                service=ServiceCounters(
                    received=requests,
                    finished={finish: requests},
                    ttft=reports.histogram([engine_ttft] * requests),
                    tpot=reports.histogram([tpot] * requests),
                ),
                memory=MemoryCounters(prefix_queries=100 * requests, prefix_hits=30 * requests),
            )
        )

    @contextmanager
    def reporting(self, every_s: float = 1.0) -> Iterator[None]:
        """Report again and again from a thread, as long as the context lasts; an outage is waited out."""
        done = threading.Event()

        def run() -> None:
            while not done.wait(every_s):
                with suppress(httpx.HTTPError):
                    self.report()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def report(self, *, running: int = 1, waiting: int = 0, used: int = 128, state: ReplicaState = ReplicaState.READY,
               core_restarts: int = 0) -> None:  # fmt: skip
        """Send both reports and expect both to be stored."""
        with self._lock:
            self._send(running=running, waiting=waiting, used=used, state=state, core_restarts=core_restarts)

    def _send(self, *, running: int, waiting: int, used: int, state: ReplicaState, core_restarts: int) -> None:
        self._sequence += 1
        now = time.time()
        common = {"boot_epoch": self._epoch, "sequence": self._sequence, "sent_at": now, "started_at": now - 60,
                  "full": True}  # fmt: skip
        replica = reports.report(
            self._replica,
            pool=POOL,
            model=MODEL,
            core_epoch=1 + core_restarts,
            core_restarts=core_restarts,
            state=state,
            ready=CoreReady(
                boot_epoch=self._epoch, model=MODEL, max_model_len=2048, block_size=16, total_blocks=512,
                device="cpu", attention_backend="cpu", forward="captured", kernel_tier="avx2", weights="blocks",
                weight_bytes=92 << 20, kv_bytes=64 << 20,
            ),
            gauges=Gauges(running=running, waiting=waiting, blocks_total=512, blocks_used=used,
                          blocks_free=512 - used, block_size=16, kv_slots_empty=64),
            windows=[Window(start=start, counters=counters, gauge_samples=1,
                            gauge_sums={"blocks_used": used, "blocks_total": 512, "running": running})
                     for start, counters in self._engine.items()],
            **common,  # type: ignore[arg-type]
        )  # fmt: skip
        gateway = reports.gateway_report(
            [
                GatewayWindow(
                    start=start, series=[reports.series(self._tenant, counters, pool=POOL, replica=self._replica)]
                )
                for start, counters in self._gateway.items()
            ],
            **common,  # type: ignore[arg-type]
        )
        for path, message in (("/internal/v1/reports", replica), ("/internal/v1/gateway-reports", gateway)):
            answer = self._client.post(path, content=encode(message), headers={"content-type": "application/msgpack"})
            answer.raise_for_status()

    def close(self) -> None:
        self._client.close()
