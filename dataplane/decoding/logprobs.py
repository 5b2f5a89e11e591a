"""Log-probabilities of tokens under the model.

Layer: model algorithm. They are log softmax of the logits as the model made them: before penalties, bias, bans,
temperature and cuts, so that they do not depend on how a request samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dataplane.protocol import TokenLogprob

ROWS_AT_ONCE = 64
"""Rows of logits that are held at once while a prompt is scored: 64 · 49,152 floats are 12 MiB."""


def score(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability and rank of `tokens` [R] in `logits` [R, vocab], and the `tops` [R] likeliest of each row.

    A rank is one more than the number of tokens that are likelier.
    """
    mass = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist()
    best, ids = logits.topk(min(max(tops), logits.shape[1]))
    columns = zip(
        tokens.tolist(),
        (chosen - mass).squeeze(1).tolist(),
        ranks,
        ids.tolist(),
        (best - mass).tolist(),
        tops,
        strict=True,
    )
    return [
        TokenLogprob(
            token_id=token, logprob=logprob, rank=rank, top=list(zip(likeliest[:top], values[:top], strict=True))
        )
        for token, logprob, rank, likeliest, values, top in columns
    ]
