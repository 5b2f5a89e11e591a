"""What comparisons with transformers share: prompts, logits of every position, greedy answers of a whole engine."""

from __future__ import annotations

import torch

from dataplane.engine import EngineCore
from dataplane.protocol import EngineRequest, SamplingParams
from dataplane.runtime.model_runner import ModelRunner
from dataplane.scheduling.plan import NewRequest, Plan


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in (1, 2, 15, 16, 17, 33, 48, 90)]


def logits(runner: ModelRunner, tokens: list[int], chunk: int) -> torch.Tensor:
    """Logits of every position, computed `chunk` tokens a step in blocks that are not in order."""
    blocks = [9, 3, 12, 5, 1, 7][: -(-len(tokens) // 16)]
    rows = []
    for start in range(0, len(tokens), chunk):
        count = min(chunk, len(tokens) - start)
        new = NewRequest("a", tokens, len(tokens), SamplingParams(), 0, (), blocks, start)
        plan = Plan(1, {"a": count}, frozenset(), new=(new,), dropped=("a",))
        runner.batch.update(plan)
        planned = runner.forward.plan(runner.batch.gather(plan))
        planned.run()
        rows.append(planned.logits(torch.arange(count)).clone())
    return torch.cat(rows)


def greedy(core: EngineCore, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    """Generate for all prompts at once; the core is left empty and sound."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    made: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        made[str(index)] = []
        core.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, arrived_at=0.0))
    while core.has_work():
        for output in core.step():
            made[output.request_id] += output.token_ids
        core.check_integrity()
    assert core.stats().gauges.blocks_used == 0
    return list(made.values())
