"""Every model family against transformers: logits at each position, and greedy answers alone, batched and in chunks.

The models are tiny and random. Prompts are longer than the window where a family has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dataplane.config import EngineConfig
from dataplane.engine import EngineCore
from dataplane.models.shape import ModelShape
from dataplane.runtime.model_runner import ModelRunner
from tests.dataplane.parity.helpers import greedy, logits, prompts
from tests.factories.families import WINDOW, config_of, random_model, reference_logits, saved

VARIANTS = (
    "llama-biased",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
)
LENGTH_BOUND = {"llama-dynamic": 64, "phi3-long": 64}
"""Variants whose rotary frequencies follow the longest sequence, and up to where they are unstretched."""


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    return saved(tmp_path_factory.mktemp(request.param), request.param)


def runner_of(folder: Path, max_model_len: int | None = None, forward: str = "auto") -> ModelRunner:
    config = EngineConfig.resolve(folder, num_blocks=33, threads=1, max_model_len=max_model_len, forward=forward)
    return ModelRunner(config, lambda: 0.0)


def assert_greedy(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> None:
    """Every token is what transformers finds most likely after those before it."""
    expected = reference_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1]
    assert answer == expected.argmax(-1).tolist()


@pytest.mark.parametrize("forward", ["eager", "captured"])
def test_logits_agree_however_the_prompt_is_cut(pair: tuple[Path, PreTrainedModel], forward: str) -> None:
    folder, theirs = pair
    tokens = prompts()[-1]
    assert len(tokens) > 2 * WINDOW
    expected, runner = reference_logits(theirs, tokens), runner_of(folder, forward=forward)
    assert expected.std() > 0.5, "logits this flat would agree by accident"
    for chunk in (1, 7, 16, len(tokens)):
        torch.testing.assert_close(logits(runner, tokens, chunk), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("forward", ["eager", "captured"])
def test_greedy_answers_are_those_of_transformers(pair: tuple[Path, PreTrainedModel], forward: str) -> None:
    folder, theirs = pair
    chosen = prompts()[2:]
    options: dict[str, Any] = {"num_blocks": 200, "threads": 1, "forward": forward}
    cold = EngineCore(EngineConfig.resolve(folder, prefix_caching=False, **options))
    alone = [greedy(cold, [prompt])[0] for prompt in chosen]
    for prompt, answer in zip(chosen, alone, strict=True):
        assert_greedy(theirs, prompt, answer)
    assert greedy(cold, chosen) == alone
    chunked = EngineCore(EngineConfig.resolve(folder, max_num_batched_tokens=8, long_prefill_threshold=7, **options))
    assert greedy(chunked, chosen) == alone
    assert greedy(chunked, chosen) == alone
    assert chunked.stats().counters.memory.prefix_hits > 0


@pytest.mark.parametrize("variant", ["mistral", "qwen2-window", "gemma2", "gemma3", "phi3"])
def test_a_window_hides_what_lies_before_it(tmp_path: Path, variant: str) -> None:
    """The control of the windows: the same weights without one give other logits, from where it ends."""
    folder, theirs = saved(tmp_path, variant)
    config = config_of(variant)
    config.sliding_window = 4096
    unbounded = random_model(config)
    tokens = prompts()[-1]
    ours, wide = logits(runner_of(folder), tokens, len(tokens)), reference_logits(unbounded, tokens)
    torch.testing.assert_close(ours[:WINDOW], wide[:WINDOW], rtol=0, atol=1e-4)
    assert (ours[WINDOW:] - wide[WINDOW:]).abs().amax(-1).min() > 1e-2
    assert ModelShape.read(folder).window(2) == WINDOW
    assert theirs.config.sliding_window == WINDOW


@pytest.mark.parametrize("variant", LENGTH_BOUND)
def test_scaling_by_length_is_that_of_the_longest_sequence(tmp_path: Path, variant: str) -> None:
    """transformers picks frequencies by a sequence's length; an engine's length is `max_model_len`."""
    folder, theirs = saved(tmp_path, variant)
    bound, tokens = LENGTH_BOUND[variant], prompts()[-1]
    for length in (bound, len(tokens)):
        expected = reference_logits(theirs, tokens[:length])
        for chunk in (13, length):
            ours = logits(runner_of(folder, max_model_len=length), tokens[:length], chunk)
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    short = logits(runner_of(folder, max_model_len=bound), tokens[:bound], bound)
    stretched = logits(runner_of(folder, max_model_len=len(tokens)), tokens[:bound], bound)
    assert (short - stretched).abs().max() > 1e-2


def test_dynamic_scaling_stretches_the_context_to_its_factor(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "llama-dynamic")
    shape = ModelShape.read(folder)
    assert (shape.context, shape.longest) == (64, 256)
    assert EngineConfig.resolve(folder, num_blocks=33).model.max_model_len == 64


@pytest.mark.parametrize("variant", ["gemma3", "phi3"])
def test_shards_hold_the_same_model_as_one_file(tmp_path: Path, variant: str) -> None:
    folder, theirs = saved(tmp_path, variant, shard="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    tokens = prompts()[4]
    torch.testing.assert_close(
        logits(runner_of(folder), tokens, len(tokens)), reference_logits(theirs, tokens), rtol=0, atol=1e-4
    )
