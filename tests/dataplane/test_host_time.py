"""What a step costs beside its model: scheduling, preparing, sampling, committing, with a model that takes no time.

Times are of this thread alone and compared within one run: least against least, so that other processes do not matter.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dataplane.config import EngineConfig
from dataplane.engine import EngineCore
from dataplane.protocol import EngineRequest, SamplingParams
from dataplane.runtime.forward import ForwardFacts, PlannedStep
from dataplane.runtime.input_batch import StepInput
from tests.factories.models import tiny_config, write_safetensors

BATCH = 32
SHORT, LONG = 64, 4096


class Instant:
    """A model that answers at once. With `reads` it looks at every token of every history."""

    def __init__(self, facts: ForwardFacts, *, reads: bool) -> None:
        self.facts, self._reads = facts, reads
        self._logits = torch.randn(BATCH, 128, generator=torch.Generator().manual_seed(1))

    def plan(self, step: StepInput) -> PlannedStep:
        if self._reads:
            assert sum(position for start in step.starts.tolist() for position in range(start)) >= 0
        return self

    def run(self) -> None:
        pass

    def logits(self, rows: Tensor) -> Tensor:
        return self._logits[: len(rows)].clone()

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_position_embeddings=8192, num_hidden_layers=1)
    return write_safetensors(tmp_path_factory.mktemp("tiny"), config)


def decoding(folder: Path, history: int, *, reads: bool) -> EngineCore:
    """A core whose batch is full of requests that decode after `history` tokens."""
    core = EngineCore(
        EngineConfig.resolve(
            folder,
            forward="eager",
            num_blocks=BATCH * (history + 128) // 16 + 2,
            max_model_len=history + 128,
            threads=1,
            max_num_seqs=BATCH,
            max_num_batched_tokens=8192,
        )
    )
    core._runner.forward = Instant(core._runner.forward.facts, reads=reads)
    generator = torch.Generator().manual_seed(history)
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    for index in range(BATCH):
        prompt = torch.randint(3, 128, (history,), generator=generator).tolist()
        core.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, arrived_at=0.0))
    while core.stats().gauges.waiting or len(core.step()) < BATCH:
        core.step()
    return core


def least(cores: dict[int, EngineCore]) -> dict[int, float]:
    """The shortest step of each, taken in turn."""
    found = dict.fromkeys(cores, float("inf"))
    for _ in range(60):
        for history, core in cores.items():
            started = time.thread_time()
            assert len(core.step()) == BATCH
            found[history] = min(found[history], time.thread_time() - started)
    return found


def test_a_long_history_costs_the_host_no_more_than_a_short_one(folder: Path) -> None:
    found = least({history: decoding(folder, history, reads=False) for history in (SHORT, LONG)})
    assert found[LONG] < 1.5 * found[SHORT]
    control = least({history: decoding(folder, history, reads=True) for history in (SHORT, LONG)})
    assert control[LONG] > 1.5 * control[SHORT], "reading every token would have been seen"
