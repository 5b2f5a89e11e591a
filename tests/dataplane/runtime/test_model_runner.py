"""What the executor makes of a plan: log-probabilities, forks, replaced blocks and transfers, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dataplane.config import EngineConfig
from dataplane.decoding.grammar import GrammarCompiler
from dataplane.decoding.sampler import NOT_FINITE
from dataplane.protocol import Grammar, GrammarKind, SamplingParams, TokenLogprob
from dataplane.runtime.model_runner import ModelRunner
from dataplane.runtime.worker import StepThread
from dataplane.scheduling.plan import NewRequest, Plan, RunningRequest, StepResult, Transfers
from tests.factories.models import tiny_config, write_safetensors

PROMPT = torch.randint(3, 128, (90,), generator=torch.Generator().manual_seed(7)).tolist()
BLOCKS = [9, 3, 12, 5, 1, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("tiny"), tiny_config())


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """transformers' log softmax at every position of PROMPT [90, vocab]."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return torch.log_softmax(theirs(torch.tensor([PROMPT])).logits[0].double(), dim=-1)


@pytest.fixture(params=["eager", "captured"])
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    config = EngineConfig.resolve(folder, num_blocks=33, host_blocks=8, threads=1, forward=request.param)
    return ModelRunner(config, lambda: 0.0)


def new(request_id: str, tokens: Sequence[int], blocks: list[int], computed: int = 0, **fields: Any) -> NewRequest:
    params = SamplingParams(**{"temperature": 0.0, **fields.pop("params", {})})
    prompt_len = fields.pop("prompt_len", len(tokens))
    return NewRequest(
        request_id, list(tokens), prompt_len, params, fields.pop("seed", 0), (), blocks, computed, **fields
    )


def run(runner: ModelRunner, *args: Any, **fields: Any) -> StepResult:
    return runner.submit(Plan(1, *args, **fields)).result()


def agrees(scored: TokenLogprob, row: torch.Tensor, token: int, top: int) -> None:
    """`scored` is `token` under the log-probabilities `row` [vocab]."""
    order = row.argsort(descending=True).tolist()
    assert (scored.token_id, scored.rank) == (token, order.index(token) + 1)
    assert [likely for likely, _ in scored.top] == order[:top]
    values = torch.tensor([scored.logprob, *(value for _, value in scored.top)], dtype=torch.float64)
    torch.testing.assert_close(values, row[[token, *order[:top]]], rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 90])
def test_a_prompt_is_scored_as_transformers_does_however_it_is_cut(
    runner: ModelRunner, expected: torch.Tensor, chunk: int
) -> None:
    scores: list[TokenLogprob | None] = []
    for start in range(0, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        changed: dict[str, Any] = {"running": (RunningRequest("a", [], start),)}
        if start == 0:
            changed = {"new": (new("a", PROMPT, BLOCKS, params={"prompt_logprobs": 3}),)}
        samples = frozenset("a" if start + count == len(PROMPT) else "")
        scores += run(runner, {"a": count}, samples, **changed).prompt_logprobs["a"]
    assert len(scores) == len(PROMPT)
    assert scores[0] is None
    for position, scored in enumerate(scores[1:], start=1):
        assert scored is not None
        agrees(scored, expected[position - 1], PROMPT[position], 3)
    decoded = run(runner, {"a": 1}, frozenset("a"), running=(RunningRequest("a", [], len(PROMPT)),))
    assert decoded.prompt_logprobs == {}


def test_a_prompt_of_one_token_has_nothing_to_score(runner: ModelRunner) -> None:
    result = run(runner, {"a": 1}, frozenset("a"), new=(new("a", [5], [1], params={"prompt_logprobs": 2}),))
    assert result.prompt_logprobs == {"a": [None]}
    assert not result.errors


def test_a_prompt_is_not_scored_again_for_a_request_that_has_output(runner: ModelRunner) -> None:
    again = new("a", PROMPT, BLOCKS, prompt_len=80, params={"prompt_logprobs": 2})
    assert run(runner, {"a": 90}, frozenset("a"), new=(again,)).prompt_logprobs == {}


def test_only_those_that_ask_are_scored_each_by_its_own_row(runner: ModelRunner, expected: torch.Tensor) -> None:
    """Cuts, penalties and bias change what is drawn, not what it is scored."""
    lengths = {"a": 20, "b": 40, "c": 33, "d": 90}
    asked: dict[str, dict[str, Any]] = {
        "a": {"logprobs": 5, "logit_bias": {11: 100.0}},
        "b": {},
        "c": {"logprobs": 0, "temperature": 2.0, "top_k": 2},
        "d": {"logprobs": 20, "repetition_penalty": 5.0, "prompt_logprobs": 0},
    }
    tables = {"a": [1, 2], "b": [3, 4, 5], "c": [6, 7, 8], "d": [9, 10, 11, 12, 13, 14]}
    admitted = tuple(new(name, PROMPT[:length], tables[name], params=asked[name]) for name, length in lengths.items())
    result = run(runner, lengths, frozenset(lengths), new=admitted)
    assert set(result.logprobs) == {"a", "c", "d"}
    assert set(result.prompt_logprobs) == {"d"}
    for name, scores in result.logprobs.items():
        (scored,), (token,) = scores, result.tokens[name]
        agrees(scored, expected[lengths[name] - 1], token, asked[name]["logprobs"])
    assert result.tokens["a"] == [11]


@pytest.mark.parametrize("length", [32, 40])
def test_a_fork_draws_its_first_token_from_its_parents_row(runner: ModelRunner, length: int) -> None:
    """Against requests of their own with the same seeds; beside decodes and a chunk, which move the rows."""
    draws = {"params": {"temperature": 1.5, "logprobs": 2}}
    prompt, tables = PROMPT[:length], {1: [1, 2, 3], 2: [4, 5, 6], 3: [7, 8, 9]}
    alone = {}
    for seed, table in tables.items():
        apart = new(f"s{seed}", prompt, table, seed=seed, **draws)
        alone[seed] = run(runner, {apart.request_id: length}, frozenset([apart.request_id]), new=(apart,))
    assert len({tuple(result.tokens[f"s{seed}"]) for seed, result in alone.items()}) == 3

    beside = (new("x", PROMPT[:5], [20], computed=4), new("y", PROMPT, [21, 22, 23]))
    parent = new("p", prompt, [10, 11, 12], seed=1, **draws)
    forks = tuple(new(f"p{seed}", prompt, [10, 11, 12], length, seed=seed, parent="p", **draws) for seed in (2, 3))
    result = run(
        runner,
        {"y": 30, "p": length, "x": 1},
        frozenset(["p", "p2", "p3", "x"]),
        new=(parent, *beside, *forks),
        dropped=("s1", "s2", "s3"),
    )
    for seed, name in ((1, "p"), (2, "p2"), (3, "p3")):
        assert result.tokens[name] == alone[seed].tokens[f"s{seed}"]
        (ours,), (theirs,) = result.logprobs[name], alone[seed].logprobs[f"s{seed}"]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert ours.rank == theirs.rank


def test_a_replaced_block_is_copied_before_the_step_and_used_in_it(runner: ModelRunner) -> None:
    """Two holders of one partial block write different tokens; without the copy one would read the other's."""
    prompt, greedy = PROMPT[:20], SamplingParams(temperature=0.0)
    truth = {}
    for name, first in (("a", 40), ("b", 41)):
        apart = new(f"{name}-alone", [*prompt, first], [20, 21])
        truth[name] = run(runner, {apart.request_id: 21}, frozenset([apart.request_id]), new=(apart,))
        run(runner, {}, frozenset(), dropped=(apart.request_id,))

    run(runner, {"seed": 20}, frozenset(), new=(new("seed", prompt, [1, 2]),))
    holders = tuple(
        NewRequest(name, [*prompt, first], 20, greedy, 0, (), [1, 2], 20) for name, first in (("a", 40), ("b", 41))
    )
    run(runner, {}, frozenset(), new=holders)
    result = run(
        runner,
        {"a": 1, "b": 1},
        frozenset(["a", "b"]),
        running=(RunningRequest("a", [], 20, replaced=(1, 5)), RunningRequest("b", [], 20)),
        transfers=Transfers(copies=((2, 5),)),
    )
    for name in "ab":
        assert result.tokens[name] == truth[name].tokens[f"{name}-alone"]
    assert not torch.equal(runner.store.keys[0][:, 2], runner.store.keys[0][:, 5])


def test_a_request_comes_back_from_host_memory_into_other_blocks(runner: ModelRunner, expected: torch.Tensor) -> None:
    """Scrubbing comes first: a block that is cleared and then filled from the host keeps what came."""
    run(runner, {"a": 48}, frozenset(), new=(new("a", PROMPT, [1, 2, 3]),))
    out = Transfers(swap_out=((1, 5), (2, 0), (3, 7)))
    run(runner, {"b": 60}, frozenset(), new=(new("b", PROMPT[::-1], [1, 2, 3, 4]),), dropped=("a",), transfers=out)
    back = Transfers(swap_in=((5, 30), (0, 4), (7, 8)))
    again = new("a", PROMPT, [30, 4, 8, 10, 11, 12], 48, params={"logprobs": 0})
    result = run(runner, {"a": 42}, frozenset("a"), new=(again,), dropped=("b",), scrub=(30, 4, 8), transfers=back)
    (scored,) = result.logprobs["a"]
    agrees(scored, expected[-1], result.tokens["a"][0], 0)


def poison(runner: ModelRunner) -> None:
    """What token 77 is looked up as is no number from now on; the head stays as it was."""
    model = runner.forward.model  # type: ignore[attr-defined]  # it is eager
    model.head = torch.nn.Parameter(model.head.clone(), requires_grad=False)
    model.embedding[77] = float("nan")


@pytest.fixture
def eager(folder: Path) -> ModelRunner:
    return ModelRunner(EngineConfig.resolve(folder, num_blocks=33, threads=1, forward="eager"), lambda: 0.0)


def test_a_prompt_that_cannot_be_scored_is_an_error_of_that_request_alone(eager: ModelRunner) -> None:
    poison(eager)
    sick = new("a", [5, 77, 6, 7], [1], params={"prompt_logprobs": 1})
    result = run(eager, {"a": 3, "b": 4}, frozenset("b"), new=(sick, new("b", [5, 6, 7, 8], [2])))
    assert result.errors == {"a": NOT_FINITE}


class Digits:
    """A vocabulary of ten digits, ids 10 to 19, and special tokens."""

    eos_token_ids = (2,)

    def vocabulary(self) -> tuple[list[bytes], list[int]]:
        special = [*range(10), *range(20, 128)]
        return [b"" if token in special else b"%d" % (token - 10) for token in range(128)], special

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [10 + int(letter) for letter in text if letter.isdigit()]


@pytest.fixture
def guided(folder: Path) -> ModelRunner:
    config = EngineConfig.resolve(folder, num_blocks=33, threads=1, forward="eager")
    return ModelRunner(config, lambda: 0.0, GrammarCompiler(Digits, config.model.shape.vocab))


def came_back(expression: str, tokens: list[int], prompt_len: int, **params: Any) -> NewRequest:
    """A request that was preempted; its output so far follows the prompt."""
    grammar = Grammar(kind=GrammarKind.REGEX, text=expression)
    return new("a", tokens, [1], prompt_len=prompt_len, params={"grammar": grammar, **params})


@pytest.mark.parametrize(("expression", "code"), [("1+", "constraint_unsatisfiable"), ("(1", "invalid_grammar")])
def test_an_output_that_its_grammar_does_not_take_up_again_is_an_error_of_that_request_alone(
    guided: ModelRunner, expression: str, code: str
) -> None:
    beside = new("b", [5, 6, 7, 8], [2])
    alone = [run(guided, {"b": 4}, frozenset("b"), new=(beside,)), run(guided, {"b": 1}, frozenset("b"))]
    lost = came_back(expression, [5, 6, 11, 12], 2)
    # The first step may be a chunk that yields nothing, and the next may have been planned before this is known.
    first = run(guided, {"a": 3, "b": 4}, frozenset("b"), new=(lost, beside), dropped=("b",))
    assert first.errors == {"a": first.refusals["a"].message}
    assert (first.refusals["a"].code, first.refusals["a"].param) == (code, "structured_outputs")
    then = run(guided, {"a": 1, "b": 1}, frozenset("ab"), running=(RunningRequest("a", [], 3),))
    assert [first.tokens["b"], then.tokens["b"]] == [result.tokens["b"] for result in alone]
    held = came_back("1+", [5, 6, 11, 11], 2)
    assert run(guided, {"a": 4}, frozenset("a"), new=(held,), dropped=("a",)).tokens["a"] in ([11], [2])


@pytest.mark.parametrize(("prompt_len", "samples"), [(3, "a"), (4, "")], ids=["drawn from", "scored"])
def test_a_failure_of_the_model_outweighs_what_the_request_is_at_fault_for(
    guided: ModelRunner, prompt_len: int, samples: str
) -> None:
    poison(guided)
    sick = came_back("(1", [5, 77, 6, 7], prompt_len, prompt_logprobs=1)
    result = run(guided, {"a": 4}, frozenset(samples), new=(sick,))
    assert (result.errors, result.refusals) == ({"a": NOT_FINITE}, {})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("forward", ["eager", "captured"])
def test_a_step_reads_the_layers_and_the_head_where_a_row_is_sampled(tmp_path: Path, forward: str, tied: bool) -> None:
    folder = write_safetensors(tmp_path, tiny_config(tie_word_embeddings=tied))
    config = EngineConfig.resolve(folder, num_blocks=33, threads=1, forward=forward)
    shape, norms = config.model.shape, 2 * config.model.shape.layers + 1
    with closing(ModelRunner(config, lambda: 0.0)) as runner:
        facts = runner.forward.facts
    assert facts.step_bytes(sampled=0) == 4 * (shape.layer_parameters + norms * shape.hidden)
    assert facts.step_bytes(sampled=3) - facts.step_bytes(sampled=0) == 4 * shape.head_parameters


def test_steps_in_a_thread_are_the_same_steps(folder: Path, runner: ModelRunner) -> None:
    """Three decodes submitted before the first result is asked for; the tokens travel inside the executor."""
    plans = [Plan(1, {"a": 20}, frozenset("a"), new=(new("a", PROMPT[:20], [1, 2, 3]),))]
    plans += [Plan(step, {"a": 1}, frozenset("a"), running=(RunningRequest("a", [], 18 + step),)) for step in (2, 3, 4)]
    expected = [runner.submit(plan).result().tokens["a"] for plan in plans]
    kind = runner.forward.facts.kind
    other = ModelRunner(EngineConfig.resolve(folder, num_blocks=33, threads=1, forward=kind), lambda: 0.0)
    with closing(StepThread(other)) as thread:
        handles = [thread.submit(plan) for plan in plans]
        assert [handle.result().tokens["a"] for handle in handles] == expected
