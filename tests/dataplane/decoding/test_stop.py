"""Which ids end a request."""

from __future__ import annotations

from dataplane.decoding.stop import stop_ids
from dataplane.protocol import SamplingParams


def test_end_of_sequence_and_the_requests_own_ids_end_it() -> None:
    assert stop_ids(SamplingParams(stop_token_ids=(7, 2)), (2, 0)) == (0, 2, 7)
    assert stop_ids(SamplingParams(stop_token_ids=(7,), ignore_eos=True), (2, 0)) == (7,)
