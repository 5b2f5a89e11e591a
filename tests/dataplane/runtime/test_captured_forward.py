"""Steps run by the CPU's kernels: a request's numbers do not depend on who shares its step, in any format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from dataplane.config import EngineConfig
from dataplane.protocol import SamplingParams
from dataplane.runtime.model_runner import ModelRunner
from dataplane.scheduling.plan import NewRequest, Plan
from tests.factories.models import tiny_config, write_gguf

LENGTHS = {"a": (40, 1), "b": (7, 1), "c": (0, 33), "d": (0, 21), "e": (0, 1)}
"""Tokens before the step, and in it."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("m") / "tiny.gguf", tiny_config(), kind=GGMLQuantizationType.Q4_1)


def runner_of(path: Path, weights: str, **options: str) -> ModelRunner:
    chosen = {"forward": "captured", "weights": weights} | options
    return ModelRunner(EngineConfig.resolve(path, num_blocks=40, threads=2, **chosen), lambda: 0.0)


def prompt(name: str) -> list[int]:
    generator = torch.Generator().manual_seed(ord(name))
    made: list[int] = torch.randint(3, 128, (sum(LENGTHS[name]),), generator=generator).tolist()
    return made


def blocks(name: str) -> list[int]:
    first = 1 + 4 * list(LENGTHS).index(name)
    return list(range(first + 3, first - 1, -1))


def run(runner: ModelRunner, names: list[str], *, before: bool) -> dict[str, Tensor]:
    """Logits of every token of each request, of the tokens `before` the step or of those in it."""
    spans = {name: (0, LENGTHS[name][0]) if before else LENGTHS[name] for name in names}
    spans = {name: span for name, span in spans.items() if span[1]}
    new = tuple(
        NewRequest(name, prompt(name), len(prompt(name)), SamplingParams(), 0, (), blocks(name), span[0])
        for name, span in spans.items()
    )
    plan = Plan(1, {name: count for name, (_, count) in spans.items()}, frozenset(), new=new)
    runner.batch.update(plan)
    step = runner.batch.gather(plan)
    planned = runner.forward.plan(step)
    planned.run()
    logits = planned.logits(torch.arange(len(step.positions))).clone()
    runner.batch.update(Plan(2, {}, frozenset(), dropped=tuple(spans)))
    return dict(zip(step.request_ids, logits.split(step.counts.tolist()), strict=True))


@pytest.mark.parametrize("weights", ["float32", "blocks", "int8", "int4"])
def test_batched_is_alone_to_the_last_bit(path: Path, weights: str) -> None:
    together = runner_of(path, weights)
    run(together, ["a", "b"], before=True)
    mixed = run(together, list(LENGTHS), before=False)
    for name in LENGTHS:
        alone = runner_of(path, weights)
        if LENGTHS[name][0]:
            run(alone, [name], before=True)
        ours = run(alone, [name], before=False)[name]
        assert ours.std() > 0.1
        assert torch.equal(ours, mixed[name]), name
        alone.close()
    together.close()


@pytest.mark.parametrize(
    ("weights", "correlation"), [("float32", 0.999999), ("blocks", 0.99), ("int8", 0.98), ("int4", 0.7)]
)
def test_fewer_bits_are_near_what_float32_gives(path: Path, weights: str, correlation: float) -> None:
    """That a format is the right weights at all: random ones forgive little. The quality bench says what it costs."""
    ours, theirs = (
        run(runner, ["c", "d"], before=False)
        for runner in (runner_of(path, weights), runner_of(path, "float32", forward="eager"))
    )
    for name, expected in theirs.items():
        assert expected.std() > 0.5
        both = torch.stack((ours[name].flatten(), expected.flatten()))
        assert correlation < torch.corrcoef(both)[0, 1]


def test_rows_may_be_asked_for_again_after_others(path: Path) -> None:
    runner = runner_of(path, "float32")
    plan = Plan(
        1, {"c": 33}, frozenset(), new=(NewRequest("c", prompt("c"), 33, SamplingParams(), 0, (), blocks("c"), 0),)
    )
    runner.batch.update(plan)
    planned = runner.forward.plan(runner.batch.gather(plan))
    planned.run()
    first = planned.logits(torch.tensor([32, 3])).clone()
    planned.logits(torch.arange(33)).fill_(7.0)
    assert torch.equal(planned.logits(torch.tensor([3, 32])), first.flip(0))
