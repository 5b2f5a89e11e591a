"""The fitted step model: it finds planted coefficients, says how sure it is, and refuses what it cannot know."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.hardware.figure import FigureKind
from dataplane.hardware.geometry import StepSize
from dataplane.hardware.stepmodel import FEATURES, MeasuredStep, StepModel, StepModelError

TRUE = {"step": 0.02, "tokens": 2e-3, "pairs": 3e-7, "context": 5e-6, "rows": 4e-3}


def sizes() -> list[StepSize]:
    prefills = [StepSize.prefill(new, cached) for new in (16, 64, 256) for cached in (0, 64, 512)]
    decodes = [StepSize.decode([length] * batch) for batch in (1, 4, 16) for length in (32, 256, 900)]
    return prefills + decodes + [a + b for a, b in zip(prefills, decodes, strict=True)]


def measured(true: dict[str, float], noise: float = 0.0, seed: int = 0) -> list[MeasuredStep]:
    rng = np.random.default_rng(seed)
    return [
        MeasuredStep(
            size,
            (true["step"] + sum(true[name] * getattr(size, name) for name in FEATURES[1:])) * rng.lognormal(0, noise),
        )
        for size in sizes()
    ]


def test_planted_coefficients_are_found() -> None:
    model = StepModel.fit(measured(TRUE), "planted")
    assert {name: figure.value for name, figure in model.coefficients.items()} == pytest.approx(TRUE, rel=1e-6)
    assert model.residuals.largest < 1e-9


def test_every_coefficient_and_prediction_carries_its_lineage() -> None:
    model = StepModel.fit(measured(TRUE), "SmolLM2 on a test machine")
    figures = [*model.coefficients.values(), model.predict(StepSize.prefill(64))]
    assert all(figure.kind is FigureKind.CALIBRATED and "test machine" in figure.source for figure in figures)
    assert all(figure.n == len(sizes()) for figure in figures)
    assert model.coefficients["tokens"].unit == "s/tokens"
    assert model.predict(StepSize.prefill(64)).unit == "s"


def test_noise_shows_in_the_residuals_and_other_steps_score_it() -> None:
    model = StepModel.fit(measured(TRUE, noise=0.05, seed=1), "noisy")
    held = model.score(measured(TRUE, noise=0.05, seed=2))
    assert 0.01 < model.residuals.median < 0.1
    assert 0.01 < held.median < 0.1
    assert model.score(measured(TRUE)).bias == pytest.approx(0.0, abs=0.05)


def test_a_different_machine_does_not_fit() -> None:
    """The control: a model of one machine scores badly on one that is three times slower at tokens."""
    model = StepModel.fit(measured(TRUE), "one machine")
    assert model.score(measured({**TRUE, "tokens": 6e-3})).median > 0.2


def test_no_cost_is_negative() -> None:
    model = StepModel.fit(measured({**TRUE, "context": -2e-6}), "a cost that would be negative")
    assert all(figure.value >= 0 for figure in model.coefficients.values())
    assert model.coefficients["context"].value == 0
    assert model.residuals.median < 0.1


def test_what_lies_beyond_the_measurements_is_marked() -> None:
    model = StepModel.fit(measured(TRUE), "planted")
    assert not model.extrapolates(StepSize.prefill(128, 64))
    assert model.extrapolates(StepSize.prefill(10_000))
    assert "extrapolated" in model.predict(StepSize.prefill(10_000)).source


def test_steps_that_cannot_tell_features_apart_are_refused() -> None:
    same = [MeasuredStep(StepSize.decode([100 * batch]), 0.1) for batch in range(1, 9)]
    with pytest.raises(StepModelError, match="do not tell"):
        StepModel.fit(same, "only one row each")
    pure = [MeasuredStep(StepSize(tokens, 0, tokens, 0), 0.1 * tokens) for tokens in range(1, 9)]
    with pytest.raises(StepModelError, match="no measured step has any pairs, rows"):
        StepModel.fit(pure, "no attention")
    with pytest.raises(StepModelError, match="as many steps"):
        StepModel.fit(measured(TRUE)[:3], "three steps")


def test_fewer_features_can_be_asked_for() -> None:
    steps = [MeasuredStep(StepSize(tokens, 0, tokens, 0), 0.5 + 0.1 * tokens) for tokens in range(1, 9)]
    model = StepModel.fit(steps, "two features", ("step", "tokens"))
    assert model.seconds(StepSize(20, 0, 0)) == pytest.approx(2.5)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    steps = measured(TRUE)
    with pytest.raises(StepModelError, match="positive time"):
        StepModel.fit([*steps, MeasuredStep(StepSize.prefill(8), seconds)], "broken")


def test_scoring_nothing_is_refused() -> None:
    with pytest.raises(StepModelError, match="no steps to score"):
        StepModel.fit(measured(TRUE), "planted").score([])
