"""What the quality bench says: its figures against their formulas, and a run whose control shows nothing."""

from __future__ import annotations

import math

import pytest
import torch

from dataplane.bench.quality import QualityCase, Scores, run
from dataplane.bench.report import document_of
from dataplane.config import ConfigError


def test_scores_are_those_of_their_formulas_however_the_text_is_cut() -> None:
    generator = torch.Generator().manual_seed(1)
    theirs = torch.randn(50, 9, generator=generator)
    ours = theirs + 0.2 * torch.randn(50, 9, generator=generator)
    targets = torch.randint(0, 9, (50,), generator=generator)
    whole, parts = Scores(), Scores()
    whole.take(ours, theirs, targets)
    for at in range(0, 50, 7):
        parts.take(ours[at : at + 7], theirs[at : at + 7], targets[at : at + 7])
    p, q = torch.softmax(theirs.double(), -1), torch.softmax(ours.double(), -1)
    expected = {
        "tokens": 50,
        "perplexity": math.exp(-q[range(50), targets].log().mean()),
        "perplexity_change": math.exp((p / q)[range(50), targets].log().mean()) - 1,
        "perplexity_error": float((p / q)[range(50), targets].log().std()) / 50**0.5,
        "agreement": float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        "divergence": float((p * (p / q).log()).sum(-1).mean()),
        "worst_logit": float((ours - theirs).abs().max()),
    }
    for scores in (whole, parts):
        assert scores.results() == pytest.approx(expected)


def test_equal_engines_score_nothing() -> None:
    logits, scores = torch.randn(20, 9, generator=torch.Generator().manual_seed(2)), Scores()
    scores.take(logits, logits.clone(), torch.zeros(20, dtype=torch.int64))
    found = scores.results()
    assert (found["perplexity_change"], found["divergence"], found["worst_logit"], found["agreement"]) == (0, 0, 0, 1)


def test_a_run_scores_every_format_beside_a_control_that_shows_nothing() -> None:
    report = run(QualityCase("smollm2", threads=2, tokens=48))
    results = report.results
    assert list(results) == ["float32", "blocks", "int8", "int4"]
    assert {found["tokens"] for found in results.values()} == {47}
    assert abs(results["float32"]["perplexity_change"]) < 1e-4
    assert results["float32"]["agreement"] == 1
    assert results["float32"]["worst_logit"] < 1e-3
    for weights in ("blocks", "int8", "int4"):
        assert 0 < results[weights]["divergence"] < 0.5
        assert results[weights]["weight_bytes"] < results["float32"]["weight_bytes"] / 2
    document = document_of(report)
    assert {"machine", "versions", "seed", "case_id"} <= set(document)
    assert document["case"]["scored"] == 47


def test_a_text_that_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ConfigError, match="a text of 1 tokens has nothing to be scored"):
        run(QualityCase("smollm2", threads=1, text="a"))
