"""Measures what this machine can do: memory bandwidth and FLOP/s as ceilings, and single operators beside them.

Layer: hardware. The only module of the cost model that runs anything. A ceiling is the best of many tries, since
nothing but the machine's limit stops the best one; an operator's time is a median. Operators stream through buffers
larger than any cache, as a model's layers do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor

from dataplane.hardware.costmodel import FP32, Op, Precision, attention, causal_pairs, linear
from dataplane.hardware.datagate import Measured
from dataplane.hardware.datasheets import DataSheet
from dataplane.hardware.device import total_memory
from dataplane.hardware.figure import Figure, FigureKind

STREAM_BYTES = 256 * 2**20
"""What the bandwidth is measured over, and what operators stream through."""
PRODUCT_SIZES = ((768, 768, 768), (1024, 1024, 1024), (512, 2048, 1024), (256, 3072, 576))
CPUINFO = Path("/proc/cpuinfo")
CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


def cpu_name() -> str:
    """What the processor calls itself."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def last_cache_bytes() -> int:
    """Bytes of the largest cache of the first core; 0 where the system does not say."""
    sizes = [path.read_text().strip() for path in CACHE.glob("index*/size")]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


def probe(threads: int, *, seconds: float = 2.0) -> DataSheet:
    """A data sheet of this machine's CPU with `threads`, taking about `seconds` for each ceiling."""
    with torch_threads(threads):
        tries, bandwidth = _bandwidth(seconds)
        source = f"probe of {cpu_name()} with {threads} threads, best of"
        flops = {}
        for precision, dtype in _DTYPES.items():
            count, best = _flops(dtype, seconds)
            flops[precision] = Figure(best, "FLOP/s", FigureKind.OBSERVED, f"{source} products", count)
    cache = last_cache_bytes()
    return DataSheet(
        name=f"{cpu_name()}, {threads} threads",
        flops=flops,
        bandwidth=Figure(bandwidth, "B/s", FigureKind.OBSERVED, f"{source} reads and copies", tries),
        memory=Figure(total_memory(), "B", FigureKind.OBSERVED, "this process's limit"),
        cache=Figure(cache, "B", FigureKind.OBSERVED, "the system's cache description") if cache else None,
    )


def time_linear(tokens: int, inputs: int, outputs: int, threads: int, *, repeats: int = 9) -> Measured:
    """x · Wᵀ in fp32 over weights that come from memory each time."""
    op = linear(tokens, inputs, outputs, FP32, activations=FP32, precision=Precision.FP32)
    copies = max(2, -(-STREAM_BYTES // (4 * inputs * outputs)))
    weights = torch.randn(copies, outputs, inputs)
    x = torch.randn(tokens, inputs)
    label = f"linear {tokens} x {inputs} → {outputs}"
    return _timed(label, op, lambda turn: F.linear(x, weights[turn]), threads=threads, repeats=repeats, copies=copies)


def time_decode(batch: int, context: int, heads: tuple[int, int, int], threads: int, *, repeats: int = 9) -> Measured:
    """One query for each of `batch` sequences over `context` keys; `heads` is (H, H_k, d_h)."""
    query_heads, kv_heads, dim = heads
    op = attention(
        queries=batch, pairs=batch * context, context=batch * context, heads=query_heads, kv_heads=kv_heads,
        head_dim=dim, kv=FP32, activations=FP32, precision=Precision.FP32,
    )  # fmt: skip
    copies = max(2, -(-STREAM_BYTES // int(op.bytes)))
    keys = torch.randn(copies, 2, batch, kv_heads, context, dim)
    q = torch.randn(batch, kv_heads, query_heads // kv_heads, dim)

    def run(turn: int) -> Tensor:
        return F.scaled_dot_product_attention(q, keys[turn, 0], keys[turn, 1])

    return _timed(f"decode {batch} x {context}", op, run, threads=threads, repeats=repeats, copies=copies)


def time_prefill(tokens: int, heads: tuple[int, int, int], threads: int, *, repeats: int = 5) -> Measured:
    """Causal attention of one prompt; `heads` is (H, H_k, d_h)."""
    query_heads, kv_heads, dim = heads
    op = attention(
        queries=tokens, pairs=causal_pairs(tokens), context=tokens, heads=query_heads, kv_heads=kv_heads,
        head_dim=dim, kv=FP32, activations=FP32, precision=Precision.FP32,
    )  # fmt: skip
    q = torch.randn(1, query_heads, tokens, dim)
    k = torch.randn(1, query_heads, tokens, dim)

    def run(turn: int) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    return _timed(f"prefill {tokens}", op, run, threads=threads, repeats=repeats, copies=1)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Run torch's operators with `threads`, and with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)


def _timed(label: str, op: Op, run: Callable[[int], Tensor], *, threads: int, repeats: int, copies: int) -> Measured:
    """The median of `repeats`, after one that warms up; each takes the next of `copies` buffers."""
    times = []
    with torch_threads(threads):
        run(0)
        for turn in range(1, repeats + 1):
            started = time.perf_counter()
            run(turn % copies)
            times.append(time.perf_counter() - started)
    return Measured(label, median(times), (op,))


def _bandwidth(seconds: float) -> tuple[int, float]:
    """(tries, best bytes/s) of summing, copying, and multiplying with a vector: what moves memory best differs."""
    rows = STREAM_BYTES // 4 // 4096
    buffer, other, vector = torch.ones(rows, 4096), torch.empty(rows, 4096), torch.ones(4096)
    moves: list[tuple[Callable[[], object], int]] = [
        (buffer.sum, STREAM_BYTES),
        (lambda: other.copy_(buffer), 2 * STREAM_BYTES),
        (lambda: torch.mv(buffer, vector), STREAM_BYTES),
    ]
    return _best(moves, seconds)


def _flops(dtype: torch.dtype, seconds: float) -> tuple[int, float]:
    """(tries, best FLOP/s) of matrix products of several shapes that fit in the caches."""
    products: list[tuple[Callable[[], object], int]] = []
    for m, n, k in PRODUCT_SIZES:
        x, w, out = torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
        products.append((lambda x=x, w=w, out=out: torch.mm(x, w.T, out=out), 2 * m * n * k))  # type: ignore[misc]
    return _best(products, seconds)


def _best(runs: list[tuple[Callable[[], object], int]], seconds: float) -> tuple[int, float]:
    """Each run in turn until `seconds` are over, at least twice; (tries, the best amount per second)."""
    best, tries, deadline = 0.0, 0, time.perf_counter() + seconds
    while tries < 2 * len(runs) or time.perf_counter() < deadline:
        run, amount = runs[tries % len(runs)]
        started = time.perf_counter()
        run()
        best = max(best, amount / (time.perf_counter() - started))
        tries += 1
    return tries, best
