"""What the replica's front lets through to the core, and what it refuses in the client's own words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dataplane.api_error import ApiError
from dataplane.config import find_model
from dataplane.grammar_check import GrammarChecker
from dataplane.intake import Intake, Prepared
from dataplane.openai import parse_chat, parse_completion
from dataplane.protocol import CoreReady
from tests.dataplane.replica.harness import MODEL, smollm2_tokenizer

CONTEXT = 256


async def prepare(*, reserves_max: bool = False, chat: bool = False, **fields: Any) -> Prepared:
    checker = GrammarChecker(find_model("smollm2")[0])
    intake = Intake(smollm2_tokenizer(), checker, max_sequences=64)
    ready = CoreReady(
        boot_epoch=1,
        model=MODEL,
        max_model_len=CONTEXT,
        block_size=16,
        total_blocks=17,
        max_num_seqs=6,
        reserves_max=reserves_max,
    )
    body = {"model": MODEL, **({"messages": [{"role": "user", "content": "Hi"}]} if chat else {}), **fields}
    parse = parse_chat if chat else parse_completion
    return await intake.prepare(parse(json.dumps(body).encode(), MODEL), ready)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "Hello", "n": 6, "max_tokens": 100}, "max_tokens"),
        ({"prompt": "Hello", "n": 6, "max_tokens": 100, "stream": True}, "max_tokens"),
        ({"prompt": "Hello", "best_of": 6, "max_tokens": 100}, "max_tokens"),
        ({"chat": True, "n": 6, "max_completion_tokens": 100}, "max_completion_tokens"),
    ],
)
async def test_samples_that_the_pool_can_never_hold_together_are_refused(fields: dict[str, Any], param: str) -> None:
    """Only where their blocks are reserved: on demand they take turns."""
    await prepare(**fields)
    with pytest.raises(ApiError) as caught:
        await prepare(reserves_max=True, **fields)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)
    assert "the KV pool holds 272 tokens" in error.message


async def test_the_default_limit_of_a_completion_gives_way_to_the_context() -> None:
    prompts = [[400] * length for length in (250, 5, 240, 241)]
    made = await prepare(prompt=prompts)
    assert [params.max_tokens for params in made.params] == [6, 16, 16, 15]
    with pytest.raises(ApiError) as caught:
        await prepare(prompt=prompts, max_tokens=16)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(ApiError) as caught:
        await prepare(prompt=[400] * CONTEXT)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
