"""The request's state machine and the check of its parameters."""

from __future__ import annotations

import itertools
import math

import pytest

from dataplane.protocol import EngineRequest, FinishReason, SamplingParams
from dataplane.request import (
    FINISH_REASONS,
    MOVES,
    InvalidTransitionError,
    Request,
    RequestError,
    RequestState,
    validate_params,
)
from tests.factories.requests import make_request

LEGAL = {
    ("waiting", "running"),
    ("waiting", "waiting_for_remote_kv"),
    ("waiting_for_remote_kv", "waiting"),
    ("running", "preempted"),
    ("running", "finished_stopped"),
    ("running", "finished_length"),
    ("preempted", "running"),
    ("preempted", "waiting_for_remote_kv"),
    *(
        (state, end)
        for state in ("waiting", "waiting_for_remote_kv", "running", "preempted")
        for end in ("finished_aborted", "finished_error")
    ),
}


@pytest.mark.parametrize(("source", "target"), list(itertools.product(RequestState, RequestState)))
def test_only_legal_moves_are_made(source: RequestState, target: RequestState) -> None:
    request = make_request("a", [1])
    request.state = source
    if (source.value, target.value) in LEGAL:
        request.move(target)
        assert request.state is target
    else:
        with pytest.raises(InvalidTransitionError, match=f"cannot go from {source} to {target}"):
            request.move(target)
        assert request.state is source


def test_final_states_have_no_exit_and_a_reason_each() -> None:
    for state, reason in FINISH_REASONS.items():
        assert state.finished
        assert state not in MOVES
        assert isinstance(reason, FinishReason)


def check(prompt_len: int = 10, **params: object) -> None:
    validate_params(SamplingParams(**params), vocab_size=100, max_model_len=64, prompt_len=prompt_len)  # type: ignore[arg-type]  # table of fields


@pytest.mark.parametrize(
    ("params", "at_fault"),
    [
        ({"temperature": 9.0}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-308}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": tuple("abcdefghijklmnopq")}, "stop"),
        ({"stop_token_ids": (100,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 100.5}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((1, 100),)}, "bad_words"),
        ({"bad_words": (tuple(range(65)),)}, "bad_words"),
        ({"bad_words": ((1,),) * 257}, "bad_words"),
    ],
)
def test_a_value_out_of_range_names_its_parameter(params: dict[str, object], at_fault: str) -> None:
    with pytest.raises(RequestError) as refused:
        check(**params)
    assert refused.value.param == at_fault
    assert refused.value.code == "invalid_value"
    assert at_fault in refused.value.message


@pytest.mark.parametrize(
    ("prompt_len", "params", "at_fault"),
    [
        (64, {}, "prompt"),
        (100, {}, "prompt"),
        (60, {"max_tokens": 5}, "max_tokens"),
        (60, {"min_tokens": 5}, "min_tokens"),
    ],
)
def test_what_exceeds_the_context_has_openais_code(prompt_len: int, params: dict[str, object], at_fault: str) -> None:
    with pytest.raises(RequestError) as refused:
        check(prompt_len, **params)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == at_fault


def test_the_edges_are_allowed() -> None:
    check(temperature=0.0, top_p=1.0, min_p=1.0, presence_penalty=-2.0, seed=-(2**63), stop_token_ids=(0, 99))
    check(temperature=2.0, max_tokens=54)
    check(logprobs=20, prompt_logprobs=0, logit_bias={0: -100.0, 99: 100.0}, bad_words=((0,), (99, 1)))
    check(63)
    check(63, max_tokens=1)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        check(0)


def test_without_a_limit_the_context_is_the_limit() -> None:
    wire = EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], params=SamplingParams(), arrived_at=0.0)
    request = Request.of(wire, now=1.0, max_model_len=64, seed=9)
    assert (request.max_tokens, request.most_tokens, request.seed) == (61, 63, 9)


def test_log_probabilities_of_a_prompt_need_all_of_it_to_be_computed() -> None:
    def wire(**params: int) -> EngineRequest:
        return EngineRequest(
            request_id="a", prompt_token_ids=[1, 2, 3], params=SamplingParams(**params), arrived_at=0.0
        )

    plain, scored = (
        Request.of(of, now=1.0, max_model_len=64, seed=9) for of in (wire(logprobs=2), wire(prompt_logprobs=0))
    )
    assert (plain.read_cache, scored.read_cache) == (True, False)


def test_what_is_left_of_a_deadline_counts_on_the_cores_clock() -> None:
    wire = EngineRequest(
        request_id="a", prompt_token_ids=[1], params=SamplingParams(), arrived_at=1000.0, deadline_at=1002.5
    )
    assert Request.of(wire, now=7.0, max_model_len=64, seed=9).deadline == 9.5


def test_a_fork_is_a_sample_of_its_own_of_the_same_prompt() -> None:
    parent = make_request("a", [1, 2, 3], forks=("b", "c"), tenant="acme", priority=2)
    parent.computed, parent.served_prompt, parent.placeholders = 3, 3, 1
    child = parent.fork("c", 2)
    parent.tokens.append(9)
    assert (child.request_id, child.tokens, child.seed, child.forks) == ("c", [1, 2, 3], 2, ())
    assert (child.computed, child.served_prompt, child.placeholders) == (3, 3, 0)
    assert (child.tenant, child.priority, child.max_tokens) == ("acme", 2, parent.max_tokens)
    parent.seed = 2**63 - 1
    assert parent.fork("b", 1).seed == -(2**63)
