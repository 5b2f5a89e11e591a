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
    request: Request, sampled: list[int], eos_token_ids: frozenset[int]
) -> tuple[list[int], RequestState | None, int | None]:
    """Append `sampled` to the request up to and including the token that ends it.

    Returns the tokens taken, the final state if it ended, and the stop id that ended it (None for the end of
    sequence, as vLLM reports it). What was sampled after the end is dropped. The sampler lets an end of sequence come
    before `min_tokens` only where a grammar leaves nothing else, and there it ends the request.
    """
    params, tokens = request.params, request.tokens
    if len(sampled) == 1 and sampled[0] not in eos_token_ids and not params.stop_token_ids:
        tokens.append(sampled[0])
        full = len(tokens) - request.prompt_len >= request.max_tokens
        return sampled, RequestState.FINISHED_LENGTH if full else None, None
    for count, token in enumerate(sampled, 1):
        tokens.append(token)
        generated = len(tokens) - request.prompt_len
        if generated >= params.min_tokens or params.grammar is not None:
            if token in eos_token_ids and not params.ignore_eos:
                return sampled[:count], RequestState.FINISHED_STOPPED, None
            if token in params.stop_token_ids:
                return sampled[:count], RequestState.FINISHED_STOPPED, token
        if generated >= request.max_tokens:
            return sampled[:count], RequestState.FINISHED_LENGTH, None
    return sampled, None, None
