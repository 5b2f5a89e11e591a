"""Which ids end a request."""

from __future__ import annotations

import pytest

from dataplane.decoding.stop import stop_ids, take_until_stop
from dataplane.protocol import Grammar, GrammarKind, SamplingParams
from dataplane.request import RequestState
from tests.factories.requests import make_request


def test_end_of_sequence_and_the_requests_own_ids_end_it() -> None:
    assert stop_ids(SamplingParams(stop_token_ids=(7, 2)), (2, 0)) == (0, 2, 7)
    assert stop_ids(SamplingParams(stop_token_ids=(7,), ignore_eos=True), (2, 0)) == (7,)


@pytest.mark.parametrize(
    ("grammar", "taken", "state"),
    [
        (None, [8, 2, 2], None),
        (Grammar(kind=GrammarKind.CHOICE, text='["yes"]'), [8, 2], RequestState.FINISHED_STOPPED),
    ],
)
def test_before_min_tokens_an_end_of_sequence_ends_only_what_its_grammar_has_finished(
    grammar: Grammar | None, taken: list[int], state: RequestState | None
) -> None:
    request = make_request("a", [5, 6], params=SamplingParams(max_tokens=20, min_tokens=9, grammar=grammar))
    assert take_until_stop(request, [8, 2, 2], frozenset({2})) == (taken, state, None)
    assert request.tokens == [5, 6, *taken]
