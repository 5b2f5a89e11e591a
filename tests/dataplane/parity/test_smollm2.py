"""The real SmolLM2-135M against transformers, greedy in float32, on 56 prompts of mixed length.

transformers reads the same GGUF file with its own reader. Each of our sequences is checked by one forward pass of
transformers over prompt and answer: every answer token must be the arg max of the position before it, which is
what greedy `generate` would have produced; for some prompts `generate` itself is run as well. Only where the two
best logits are closer than 1e-4 may the other one be taken, and that is counted and bounded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel, modeling_utils
from transformers.utils import logging

from dataplane.llm import LLM
from dataplane.models.loader import load_model
from dataplane.protocol import Grammar, GrammarKind, SamplingParams

TIE = 1e-4
COUNT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)

QUESTIONS = [
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "Write a haiku about the sea.",
    "List three prime numbers.",
    "Who wrote Hamlet?",
    "How do I sort a list in Python?",
    "Translate 'good morning' into German.",
    "What is 12 times 9?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue? 🌤️",
    "Was ist der Unterschied zwischen Strom und Spannung?",
    "请用中文介绍一下长城。",
    "Summarise the plot of Romeo and Juliet in one sentence.",
    "What does HTTP 503 mean?",
    "Name a noble gas.",
    "Tell me a joke about programmers.",
]
STARTS = [
    "The",
    "Once upon a time",
    "def fibonacci(n):\n",
    "1, 2, 3, 4,",
    "The quick brown fox jumps over the lazy",
    "In 1969, the first human",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "     \n\n",
    "E = mc^2 means that",
    "# README\n\nThis project",
    "¿Cómo estás? Estoy",
    "Ωμέγα και άλφα",
    "<html>\n<head>",
    "A list of fruits:\n- apple\n- banana\n-",
    "The answer to the ultimate question of life is 42 because",
    "import numpy as np\nx = np.",
    "import os",
    "!!!",
    "Roses are red,",
]
PARAGRAPH = (
    "The river had always been the heart of the town. In spring it rose and carried the last ice past the mill, and "
    "in late summer it shrank to a string of pools where the children looked for crayfish. Nobody remembered a year "
    "in which it had been dry. "
)
SHARED = "You are a careful assistant who answers briefly and says when something is not known. " * 8


def texts(llm: LLM) -> list[list[int]]:
    """Token ids of all prompts: chats, bare starts, long texts, and a group with a common beginning."""
    chats = [llm.tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    starts = [llm.tokenizer.encode(start) for start in STARTS]
    long = [llm.tokenizer.encode(PARAGRAPH * times + "Then") for times in (1, 2, 3, 5, 8, 13)]
    edges = [llm.tokenizer.encode(PARAGRAPH * 2)[:length] for length in (1, 15, 16, 17, 32, 33)]
    group = [
        llm.tokenizer.apply_chat_template(
            [{"role": "system", "content": SHARED}, {"role": "user", "content": question}]
        )
        for question in QUESTIONS[:8]
    ]
    return [*chats, *starts, *long, *edges, *group]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", threads=2, weights="float32")


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return texts(llm)


@pytest.fixture(scope="module")
def oracle(llm: LLM) -> Iterator[Oracle]:
    """transformers' model of the same file. It asks for `accelerate` by name and does not use it on a CPU."""
    path = llm.config.model.path
    logging.disable_progress_bar()
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setattr(modeling_utils, "is_accelerate_available", lambda *_: True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    patch.undo()
    yield Oracle(model)
    logging.enable_progress_bar()


class Oracle:
    """transformers' verdict on a sequence, remembered."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.ties: set[tuple[int, ...]] = set()
        self._judged: set[tuple[int, ...]] = set()

    def judge(self, prompt: list[int], answer: list[int]) -> None:
        """Every token of `answer` is the greedy choice after what comes before it, or a genuine tie."""
        sequence = (*prompt, *answer)
        if sequence in self._judged:
            return
        self._judged.add(sequence)
        with torch.inference_mode():
            logits = self.model(torch.tensor([sequence[:-1]]), logits_to_keep=len(answer)).logits[0]
        for index, token in enumerate(answer):
            best, gap = int(logits[index].argmax()), float(logits[index].max() - logits[index, token])
            if token != best:
                assert gap < TIE, f"token {index} is {token}, transformers' is {best}, {gap:.2e} better: {prompt[:20]}"
                self.ties.add(sequence[: len(prompt) + index])

    def generate(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=COUNT,
                min_new_tokens=COUNT,
                eos_token_id=None,
                pad_token_id=0,
            )
        made: list[int] = out[0, len(prompt) :].tolist()
        return made


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(prompts, GREEDY)]


def assert_everything_is_free(llm: LLM) -> None:
    llm.core.check_integrity()
    gauges = llm.core.stats().gauges
    assert (gauges.blocks_used, gauges.blocks_free) == (0, gauges.blocks_total)


def test_the_weights_are_those_transformers_reads(llm: LLM, oracle: Oracle) -> None:
    theirs, model = oracle.model.state_dict(), llm.config.model
    loaded = load_model(model.path, model.shape, positions=8, dtype=torch.float32, device=torch.device("cpu"))
    for name, ours in loaded.weights().items():
        assert torch.equal(ours, theirs[name]), name


@pytest.mark.timeout(900)
def test_tokens_are_transformers_greedy_choice_alone_batched_and_with_a_warm_cache(
    llm: LLM, oracle: Oracle, prompts: list[list[int]]
) -> None:
    assert len(prompts) >= 50
    assert {len(prompt) < 16 for prompt in prompts} == {True, False}
    assert max(map(len, prompts)) > 600

    alone = []
    for prompt in prompts:
        assert llm.core.reset_prefix_cache()
        alone += answers(llm, [prompt])
    assert llm.core.stats().counters.memory.prefix_hits == 0
    assert_everything_is_free(llm)

    assert llm.core.reset_prefix_cache()
    batched = answers(llm, prompts)
    assert_everything_is_free(llm)
    within = llm.core.stats().counters.memory.prefix_hits
    assert within > 7 * 128, "the group with a common beginning shares it inside one batch"

    warm = answers(llm, prompts)
    assert_everything_is_free(llm)
    found = llm.core.stats().counters.memory.prefix_hits - within
    assert found == sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)

    for prompt, *made in zip(prompts, alone, batched, warm, strict=True):
        for answer in made:
            assert len(answer) == COUNT
            oracle.judge(prompt, answer)
    assert len(oracle.ties) <= 2, f"more near-ties than float32 explains: {oracle.ties}"
    if not oracle.ties:
        assert alone == batched == warm


def test_generate_of_transformers_itself_gives_the_same(llm: LLM, oracle: Oracle, prompts: list[list[int]]) -> None:
    chosen = prompts[::8]
    for prompt, answer in zip(chosen, answers(llm, chosen), strict=True):
        assert oracle.generate(prompt) == answer


def test_a_seeded_request_draws_the_same_tokens_whoever_shares_its_batch(llm: LLM, prompts: list[list[int]]) -> None:
    seeded = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_tokens=COUNT, ignore_eos=True)
    alone = llm.generate([prompts[0]], seeded)[0].token_ids
    crowd = [SamplingParams(temperature=1.0, max_tokens=COUNT, seed=index) for index in range(10)]
    beside = llm.generate([*prompts[1:11], prompts[0]], [*crowd, seeded])[-1].token_ids
    assert beside == alone
    other = llm.generate([prompts[0]], SamplingParams(temperature=0.9, seed=99, max_tokens=COUNT, ignore_eos=True))
    assert other[0].token_ids != alone


@pytest.mark.timeout(900)
def test_log_probabilities_are_transformers_log_softmax(llm: LLM, oracle: Oracle, prompts: list[list[int]]) -> None:
    """Of prompts (some longer than one chunk) and of outputs drawn with a temperature, to 1e-4."""
    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, logprobs=5, prompt_logprobs=2, frequency_penalty=1.0
    )
    chosen = [prompts[0], prompts[11], prompts[38], prompts[41], prompts[42]]
    assert max(map(len, chosen)) > llm.config.scheduler.max_num_batched_tokens > min(map(len, chosen))
    for made in llm.generate(chosen, params):
        sequence = [*made.prompt_token_ids, *made.token_ids]
        with torch.inference_mode():
            rows = torch.log_softmax(oracle.model(torch.tensor([sequence])).logits[0], dim=-1)
        assert made.prompt_logprobs is not None
        assert made.logprobs is not None
        scored = [*made.prompt_logprobs, *made.logprobs]
        assert scored[0] is None
        assert len(scored) == len(sequence)
        for position, one in enumerate(scored[1:], start=1):
            assert one is not None
            row = rows[position - 1]
            assert one.token_id == sequence[position]
            ours = torch.tensor([one.logprob, *(value for _, value in one.top)])
            theirs = torch.tensor([row[one.token_id], *row.topk(len(one.top)).values])
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TIE)
            assert abs(int((row > row[one.token_id]).sum()) + 1 - one.rank) <= max(1, one.rank // 100)


def test_two_steps_in_flight_and_a_host_tier_change_no_token(llm: LLM, prompts: list[list[int]]) -> None:
    """Overlapped, in a pool that is too small, with swap and offload, against the undisturbed engine."""
    chosen = [*prompts[:12], *prompts[36:40], *prompts[-4:]]
    held = Grammar(kind=GrammarKind.REGEX, text="[a-z]{2,7}( [a-z]{2,7}){3,9}")
    kinds = (
        GREEDY,
        SamplingParams(temperature=0.8, seed=1, max_tokens=COUNT, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2, max_tokens=COUNT, grammar=held),
    )
    params = [kinds[index % 3] for index in range(len(chosen))]
    expected = [completion.token_ids for completion in llm.generate(chosen, params)]
    tight = LLM(
        "smollm2",
        threads=2,
        weights="float32",
        num_blocks=41,
        max_model_len=640,
        steps_in_flight=2,
        preemption="swap",
        host_blocks=128,
    )
    for _ in range(2):
        assert [completion.token_ids for completion in tight.generate(chosen, params)] == expected
        assert_everything_is_free(tight)
    counters = tight.core.stats().counters
    assert counters.scheduling.preemptions["swap"] > 0
    assert counters.memory.host_hits > 0


def test_samples_of_one_prompt_are_requests_with_those_seeds(llm: LLM, prompts: list[list[int]]) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, seed=seed, max_tokens=COUNT, ignore_eos=True)

    for prompt in (prompts[0], prompts[40]):
        apart = [llm.generate([prompt], params(70 + k))[0].token_ids for k in range(4)]
        assert len({tuple(tokens) for tokens in apart}) == 4
        copied = llm.core.stats().counters.memory.copied
        assert [made.token_ids for made in llm.generate([prompt], params(70), n=4)] == apart
        assert llm.core.stats().counters.memory.copied - copied == (3 if len(prompt) % 16 else 0)
        assert_everything_is_free(llm)
