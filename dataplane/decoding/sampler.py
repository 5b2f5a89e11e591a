"""From logits to tokens.

Layer: model algorithm. Greedy rows cost one argmax and nothing else. The randomness of a sampled row depends on
its request's seed and the position of the token alone, so a request draws the same tokens whoever shares its
batch, and draws them again after a preemption. It chooses; it does not decide when a request ends.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from dataplane.decoding.bad_words import BadWords
from dataplane.decoding.bias import LogitBias
from dataplane.decoding.grammar import GrammarError, GrammarState, mask_words, unpack
from dataplane.protocol import SamplingParams
from dataplane.request import RequestError

NOT_FINITE = "the model produced a logit that is not a number"
NOTHING_LEFT = (
    "no token is allowed here: bad_words, and min_tokens with what ends an answer, forbid all that the grammar allows"
)


class RowParams:
    """One request's sampling parameters and what they need to know of its progress."""

    __slots__ = (
        "bad_words",
        "bias",
        "generated",
        "grammar",
        "params",
        "penalised",
        "prompt_seen",
        "seed",
        "stop_ids",
        "used",
    )

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        stop_ids: tuple[int, ...],
        tokens: list[int],
        prompt_len: int,
        *,
        grammar: GrammarState | None = None,
    ) -> None:
        """`grammar` stands where the output stands."""
        self.params, self.seed, self.stop_ids = params, seed, stop_ids
        self.generated = len(tokens) - prompt_len
        self.penalised = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.prompt_seen = frozenset(tokens[:prompt_len]) if self.penalised else frozenset()
        self.used: Counter[int] = Counter(tokens[prompt_len:]) if self.penalised else Counter()
        self.bias = LogitBias(params.logit_bias) if params.logit_bias else None
        self.bad_words = BadWords(params.bad_words, tokens) if params.bad_words else None
        self.grammar = grammar

    def take(self, token: int) -> None:
        """A token was generated. Raises GrammarError when the row's grammar does not allow it."""
        self.generated += 1
        if self.penalised:
            self.used[token] += 1
        if self.bad_words is not None:
            self.bad_words.take(token)
        if self.grammar is not None:
            self.grammar.accept(token)

    @property
    def plain(self) -> bool:
        """Whether the row's logits can be used as they are."""
        constrained = self.bias is not None or self.bad_words is not None or self.grammar is not None
        return not (self.penalised or constrained or self.held_back)

    @property
    def held_back(self) -> tuple[int, ...]:
        """Tokens that may not come yet. An output that its grammar leaves nothing to add to may end early."""
        if self.generated >= self.params.min_tokens or (self.grammar is not None and self.grammar.finished):
            return ()
        return self.stop_ids

    @property
    def banned(self) -> list[int]:
        """Tokens that may not come now."""
        return [*self.held_back, *(self.bad_words.banned() if self.bad_words is not None else ())]

    @property
    def forbids(self) -> bool:
        """Whether the request itself rules tokens out here; where it does not, a row of −∞ is the engine's failure."""
        return self.grammar is not None or bool(self.banned)

    def unsatisfiable(self, sentence: str) -> RequestError:
        """The refusal of a request that cannot go on as asked, under the name of what is to be changed."""
        at_fault = "bad_words" if sentence == NOTHING_LEFT and self.bad_words is not None else "structured_outputs"
        return RequestError(sentence, "constraint_unsatisfiable", at_fault)

    @property
    def uniform(self) -> float:
        """The row's random number in [0, 1): a hash of seed and position."""
        digest = hashlib.blake2b(f"{self.seed}:{self.generated}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, rows: list[RowParams]) -> tuple[list[int], dict[int, str]]:
    """A token for each row of `logits` [R, vocab], and by index what is wrong with rows that cannot have one.

    Such a row gets token 0, which nobody should use. `logits` may be written to.
    """
    bad: dict[int, str] = {}
    for index, row in enumerate(rows):
        if not row.plain:
            try:
                _adjust(logits[index], row)
            except GrammarError as error:
                bad[index] = str(error)
    best, tokens = _likeliest(logits)
    for index in torch.nonzero(~torch.isfinite(best)).flatten().tolist():
        if best[index] == float("-inf") and rows[index].forbids:
            bad.setdefault(index, NOTHING_LEFT)
        else:
            bad[index] = NOT_FINITE
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0.0 and index not in bad]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [rows[index] for index in drawn])
    if bad:
        tokens[list(bad)] = 0
    return tokens.tolist(), bad


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row and where it is; NaN where a row has one.

    numpy's argmax is vectorised over a row and torch's, which looks for the value and the place at once, is not: a
    tenth of the time for 32 rows of 49,152.
    """
    tokens = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1), tokens


def check_beginning(
    params: SamplingParams, stop_ids: tuple[int, ...], prompt: list[int], grammar: GrammarState, vocab: int
) -> None:
    """Raises RequestError when not even a first token is allowed by all that the request forbids and requires."""
    row = RowParams(replace(params, temperature=0.0), 0, stop_ids, prompt, len(prompt), grammar=grammar)
    if row.banned:
        _, bad = sample(torch.zeros(1, vocab), [row])
        if bad:
            raise row.unsatisfiable(bad[0])


def _adjust(logits: Tensor, row: RowParams) -> None:
    """Penalties, bias, and what may not come, in this order and in place on one row [vocab].

    Repetition (CTRL, Keskar et al. 2019) over prompt and output, presence and frequency (OpenAI) over output.
    """
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(row.prompt_seen | row.used.keys()))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if row.used and (params.presence_penalty or params.frequency_penalty):
        used = torch.tensor(list(row.used.keys()))
        counts = torch.tensor(list(row.used.values()), dtype=logits.dtype)
        logits[used] -= params.presence_penalty + params.frequency_penalty * counts
    if row.bias is not None:
        row.bias.apply(logits)
    if banned := row.banned:
        logits[banned] = float("-inf")
    if row.grammar is not None:
        mask = np.zeros(mask_words(len(logits)), dtype=np.int32)
        row.grammar.fill(mask)
        logits.masked_fill_(torch.from_numpy(~unpack(mask, len(logits))), float("-inf"))


def _draw(logits: Tensor, rows: list[RowParams]) -> Tensor:
    """Temperature, top-k, top-p, min-p in this order, then the token where the cumulated mass passes u [R]."""
    temperature = torch.tensor([row.params.temperature for row in rows]).clamp_min(1e-5).unsqueeze(1)
    logits = logits / temperature
    if any(0 < row.params.top_k < logits.shape[1] or row.params.top_p < 1.0 for row in rows):
        _keep_top(logits, rows)
    probabilities = torch.softmax(logits.double(), dim=-1)
    if any(row.params.min_p > 0.0 for row in rows):
        floor = torch.tensor([row.params.min_p for row in rows], dtype=torch.float64).unsqueeze(1)
        probabilities[probabilities < floor * probabilities.amax(dim=-1, keepdim=True)] = 0.0
    mass = probabilities.cumsum(dim=-1)
    target = torch.tensor([row.uniform for row in rows], dtype=torch.float64).unsqueeze(1) * mass[:, -1:]
    return torch.searchsorted(mass, target, right=True).clamp_max(logits.shape[1] - 1).squeeze(1)


def _keep_top(logits: Tensor, rows: list[RowParams]) -> None:
    """Set what top-k and top-p leave out to −∞, in place, for the rows that ask for it."""
    vocab = logits.shape[1]
    for index, row in enumerate(rows):
        k, p = row.params.top_k, row.params.top_p
        if not 0 < k < vocab and p >= 1.0:
            continue
        values, order = logits[index].topk(k) if 0 < k < vocab else logits[index].sort(descending=True)
        if p < 1.0:
            mass = torch.softmax(values, dim=-1).cumsum(dim=-1)
            keep = int((mass < p).sum()) + 1
            order, values = order[:keep], values[:keep]
        logits[index].fill_(float("-inf"))
        logits[index, order] = values
