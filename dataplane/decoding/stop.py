"""When a request ends by its tokens.

Layer: model algorithm. Pure. Stop strings are found where text is made, in the detokenizer; here are the end of
sequence, stop ids and the output limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.protocol import SamplingParams
from dataplane.request import Request, RequestState


def stop_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Every id that ends this request; the sampler holds them back until `min_tokens` are out."""
    ends = () if params.ignore_eos else tuple(eos_token_ids)
    return tuple(sorted({*ends, *params.stop_token_ids}))


def take_until_stop(
    request: Request, sampled: Sequence[int], eos_token_ids: frozenset[int]
) -> tuple[list[int], RequestState | None, int | None]:
    """Append `sampled` to the request up to and including the token that ends it.

    Returns the tokens taken, the final state if it ended, and the stop id that ended it (None for the end of
    sequence, as vLLM reports it). What was sampled after the end is dropped.
    """
    params, tokens = request.params, request.tokens
    for count, token in enumerate(sampled, 1):
        tokens.append(token)
        generated = len(tokens) - request.prompt_len
        if generated >= params.min_tokens:
            if token in eos_token_ids and not params.ignore_eos:
                return list(sampled[:count]), RequestState.FINISHED_STOPPED, None
            if token in params.stop_token_ids:
                return list(sampled[:count]), RequestState.FINISHED_STOPPED, token
        if generated >= request.max_tokens:
            return list(sampled[:count]), RequestState.FINISHED_LENGTH, None
    return list(sampled), None, None
