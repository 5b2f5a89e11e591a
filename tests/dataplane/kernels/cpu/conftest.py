"""Executors of each instruction set that this processor has, kept for the whole run: threads are slow to start."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

import pytest

from dataplane.kernels.cpu import build
from dataplane.kernels.cpu.executor import CpuExecutor

Executors = Callable[[str, int], CpuExecutor]
TIERS = ("scalar", "neon") if platform.machine() in ("aarch64", "arm64") else ("scalar", "avx2", "avx512")


@pytest.fixture(scope="session")
def executors() -> Iterator[Executors]:
    """An executor by instruction set and number of threads; skips where the processor or a compiler is missing."""
    made: dict[tuple[str, int], CpuExecutor] = {}

    def executor(tier: str, threads: int) -> CpuExecutor:
        if (tier, threads) not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(build.CHOICE, tier)
                reason = build.offer()
                if reason is not None:
                    pytest.skip(reason)
                made[tier, threads] = CpuExecutor(threads)
        return made[tier, threads]

    yield executor
    for executor_made in made.values():
        executor_made.close()


@pytest.fixture(params=TIERS)
def executor(request: pytest.FixtureRequest, executors: Executors) -> CpuExecutor:
    """Two threads of one instruction set after the other."""
    return executors(request.param, 2)
