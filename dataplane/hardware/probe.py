"""Measures what this machine can do: memory bandwidth and FLOP/s as ceilings, and single operators beside them.

Layer: hardware. The only module of the cost model that runs anything. A ceiling is the best of many tries, since
nothing but the machine's limit stops the best one; an operator's time is a median. Operators stream through buffers
larger than any cache, as a model's layers do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
SLICE_BYTES = 16 * 2**20
"""One try of the bandwidth: short enough that other work on the machine leaves some tries alone."""
PRODUCT_SIZES = ((256, 768, 768), (512, 512, 512), (768, 768, 768), (128, 3072, 576))
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


class OperatorTimer:
    """Times single fp32 operators with `threads`; every operand that a model streams comes from memory each time.

    A time is the median of `repeats`, after one run that warms up.
    """

    def __init__(self, threads: int, repeats: int) -> None:
        self._threads, self._repeats = threads, repeats
        self._pool = torch.ones(STREAM_BYTES // 4)

    def linear(self, tokens: int, inputs: int, outputs: int) -> Measured:
        """x [tokens, inputs] · Wᵀ."""
        op = linear(tokens, inputs, outputs, FP32, activations=FP32, precision=Precision.FP32)
        weights = self._copies(outputs, inputs)
        x = torch.ones(tokens, inputs)
        label = f"linear {tokens} x {inputs} → {outputs}"
        return self._timed(label, op, lambda turn: F.linear(x, weights[turn % len(weights)]))

    def decode(self, batch: int, context: int, heads: tuple[int, int, int]) -> Measured:
        """One query for each of `batch` sequences over `context` keys; `heads` is (H, H_k, d_h)."""
        query_heads, kv_heads, dim = heads
        op = attention(
            queries=batch, pairs=batch * context, context=batch * context, heads=query_heads, kv_heads=kv_heads,
            head_dim=dim, kv=FP32, activations=FP32, precision=Precision.FP32,
        )  # fmt: skip
        keys = self._copies(2, batch, kv_heads, context, dim)
        q = torch.ones(batch, kv_heads, query_heads // kv_heads, dim)

        def run(turn: int) -> Tensor:
            k, v = keys[turn % len(keys)]
            return F.scaled_dot_product_attention(q, k, v)

        return self._timed(f"decode {batch} x {context}", op, run)

    def prefill(self, tokens: int, heads: tuple[int, int, int]) -> Measured:
        """Causal attention of one prompt; `heads` is (H, H_k, d_h)."""
        query_heads, kv_heads, dim = heads
        op = attention(
            queries=tokens, pairs=causal_pairs(tokens), context=tokens, heads=query_heads, kv_heads=kv_heads,
            head_dim=dim, kv=FP32, activations=FP32, precision=Precision.FP32,
        )  # fmt: skip
        operands = self._copies(3, 1, query_heads, tokens, dim)

        def run(turn: int) -> Tensor:
            q, k, v = operands[turn % len(operands)]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return self._timed(f"prefill {tokens}", op, run)

    def _copies(self, *shape: int) -> Tensor:
        """As many operands of `shape` as the pool holds, at least one."""
        size = math.prod(shape)
        count = max(1, len(self._pool) // size)
        pool = self._pool if count * size <= len(self._pool) else torch.ones(size)
        return pool[: count * size].view(count, *shape)

    def _timed(self, label: str, op: Op, run: Callable[[int], Tensor]) -> Measured:
        times = []
        with torch_threads(self._threads):
            run(0)
            for turn in range(1, self._repeats + 1):
                started = time.perf_counter()
                run(turn)
                times.append(time.perf_counter() - started)
        return Measured(label, median(times), (op,))


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


def _bandwidth(seconds: float) -> tuple[int, float]:
    """(tries, best bytes/s) of summing, copying, and multiplying with a vector: what moves memory best differs."""
    rows, slices = SLICE_BYTES // 4 // 4096, STREAM_BYTES // SLICE_BYTES
    buffer, other, vector = torch.ones(slices, rows, 4096), torch.empty(slices, rows, 4096), torch.ones(4096)
    # Each kind goes over all slices before the next: no slice is in a cache when its turn comes.
    moves: list[tuple[Callable[[], object], int]] = [
        *((source.sum, SLICE_BYTES) for source in buffer),
        *((partial(torch.mv, source, vector), SLICE_BYTES) for source in buffer),
        *((partial(target.copy_, source), 2 * SLICE_BYTES) for target, source in zip(other, buffer, strict=True)),
    ]
    return _best(moves, seconds)


def _flops(dtype: torch.dtype, seconds: float) -> tuple[int, float]:
    """(tries, best FLOP/s) of matrix products of several shapes that fit in the caches."""
    products: list[tuple[Callable[[], object], int]] = []
    for m, n, k in PRODUCT_SIZES:
        x, w, out = torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
        products.append((partial(torch.mm, x, w.T, out=out), 2 * m * n * k))
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
