"""Ours against transformers on tiny random models: logits, and greedy tokens however the work is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.gguf.dequant import dequantize as transformers_dequantize

from dataplane.config import EngineConfig
from dataplane.engine import EngineCore
from dataplane.runtime.model_runner import ModelRunner
from tests.dataplane.parity.helpers import greedy, logits, prompts
from tests.factories.models import tiny_config, write_safetensors

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa-tied": {},
    "mha-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "mqa-wide-head": {"num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6},
    "rope-linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope-llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = write_safetensors(tmp_path_factory.mktemp(request.param), tiny_config(**VARIANTS[request.param]))
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def reference(model: PreTrainedModel, tokens: list[int], count: int = 12) -> list[int]:
    """transformers' greedy continuation; it may not end early."""
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
            eos_token_id=None,
        )
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("forward", ["eager", "captured"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 90])
def test_logits_agree_however_the_prompt_is_cut(pair: tuple[Path, PreTrainedModel], chunk: int, forward: str) -> None:
    folder, theirs = pair
    runner = ModelRunner(EngineConfig.resolve(folder, num_blocks=33, threads=1, forward=forward), lambda: 0.0)
    tokens = prompts()[-1]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.5, "logits this flat would agree by accident"
    torch.testing.assert_close(logits(runner, tokens, chunk), expected, rtol=0, atol=1e-4)


def test_logits_at_a_position_do_not_know_later_tokens(pair: tuple[Path, PreTrainedModel]) -> None:
    runner = ModelRunner(EngineConfig.resolve(pair[0], num_blocks=33, threads=1), lambda: 0.0)
    tokens = prompts()[-1]
    other = [*tokens[:40], *((token + 1) % 128 for token in tokens[40:])]
    one, two = logits(runner, tokens, 90), logits(runner, other, 90)
    torch.testing.assert_close(one[:40], two[:40], rtol=0, atol=1e-5)
    assert (one[40] - two[40]).abs().max() > 0.1


def test_greedy_tokens_are_those_of_transformers_alone_batched_chunked_and_cached(
    pair: tuple[Path, PreTrainedModel],
) -> None:
    folder, theirs = pair
    expected = [reference(theirs, prompt) for prompt in prompts()]
    cold = EngineCore(EngineConfig.resolve(folder, num_blocks=200, threads=1, prefix_caching=False))
    assert [greedy(cold, [prompt])[0] for prompt in prompts()] == expected
    assert greedy(cold, prompts()) == expected
    assert cold.stats().counters.memory.prefix_hits == 0
    for budget in (1, 3, 7, 16):
        chunked = EngineCore(
            EngineConfig.resolve(
                folder, num_blocks=200, threads=1, max_num_batched_tokens=max(budget, 8), long_prefill_threshold=budget
            )
        )
        assert greedy(chunked, prompts()) == expected
        hits = chunked.stats().counters.memory.prefix_hits
        assert greedy(chunked, prompts()) == expected
        assert chunked.stats().counters.memory.prefix_hits - hits >= 16 * (1 + 2 + 2 + 5)


def test_greedy_tokens_survive_preemption(pair: tuple[Path, PreTrainedModel]) -> None:
    folder, theirs = pair
    chosen = prompts()[2:6]
    expected = [reference(theirs, prompt, 30) for prompt in chosen]
    for caching in (True, False):
        tight = EngineCore(
            EngineConfig.resolve(
                folder, num_blocks=9, max_model_len=64, threads=1, watermark=0.0, prefix_caching=caching
            )
        )
        assert greedy(tight, chosen, 30) == expected
        assert tight.stats().counters.scheduling.preemptions["recompute"] > 0


SCALE_BYTES = {"Q4_0": (0, 2), "Q4_1": (0, 4), "Q8_0": (0, 2), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}


@pytest.mark.parametrize("kind", SCALE_BYTES)
def test_dequantised_blocks_are_those_of_transformers(kind: str) -> None:
    """Two independent readings of a block type, on random bytes with sane scales."""
    quant = GGMLQuantizationType[kind]
    size = GGML_QUANT_SIZES[quant][1]
    generator = np.random.default_rng(3)
    blocks = generator.integers(0, 256, (32, size), dtype=np.uint8)
    start, end = SCALE_BYTES[kind]
    scales = generator.uniform(0.01, 0.1, (32, (end - start) // 2)).astype(np.float16)
    blocks[:, start:end] = scales.view(np.uint8)
    raw = blocks.reshape(8, 4 * size)
    ours = torch.from_numpy(dequantize(raw, quant).copy())
    theirs = transformers_dequantize(torch.from_numpy(raw.copy()), int(quant)).reshape(ours.shape)
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
