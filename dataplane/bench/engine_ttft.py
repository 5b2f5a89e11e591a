"""Time to first token of the real engine at several prefix hit ratios, and the two predictions of it.

Layer: service. One request at a time through `LLM`; it measures and predicts, and prints nothing. Predictions rest on
steps without any hit, so that no hit it is scored on was fitted to.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dataplane.errors import IntegrityError
from dataplane.hardware.device import cores
from dataplane.hardware.geometry import Geometry, StepSize
from dataplane.hardware.hit_area import FirstToken, amdahl_bound, area_saved, capacity_gain, hit_tokens
from dataplane.hardware.probe import cpu_name
from dataplane.hardware.stepmodel import MeasuredStep, Residuals, StepModel
from dataplane.llm import LLM
from dataplane.protocol import EngineRequest, SamplingParams

DECODED = 16
"""Tokens after the first, over which TPOT is taken."""
SHARES = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Prompts of the calibration, as shares of the longest."""
BATCHES = (1, 4, 8)


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one thing, in seconds."""

    median: float
    least: float
    most: float
    n: int

    @staticmethod
    def of(times: Sequence[float]) -> Spread:
        return Spread(median(times), min(times), max(times), len(times))


@dataclass(frozen=True, slots=True)
class HitResult:
    """One hit ratio. Times in seconds; `saved` is S. `by_area` and `by_steps` predict the median of `ttft`.

    `gain` is how many more tokens a minute (TPM) the engine makes than without hits: the most that any hit could give
    (Amdahl), predicted (the TPM correction) and measured. `tpot` is the control, of which no prediction exists but
    that it stays.
    """

    ratio: float
    cached: int
    saved: float
    ttft: Spread
    tpot: Spread
    by_area: float
    by_steps: float
    gain_bound: float
    gain_predicted: float
    gain_measured: float


@dataclass(frozen=True, slots=True)
class EngineResult:
    """All of it: the fit, how it does on steps it has not seen, and the hit ratios."""

    model: StepModel
    held_out: Residuals
    hits: tuple[HitResult, ...]
    prompt: int
    kappa: float


class EngineBench:
    """The engine with room for one whole prompt a step, so that TTFT is one step and not a matter of chunks."""

    def __init__(self, model: str, *, prompt: int, threads: int | None, seed: int) -> None:
        length = prompt + DECODED + 2
        per_request = -(-length // 16) + 1
        self.llm = LLM(
            model,
            weights="float32",  # what the geometry's bytes are those of
            max_model_len=length,
            num_blocks=max(4 * per_request, 2 * max(BATCHES) * per_request) + 1,
            max_num_seqs=max(BATCHES),
            max_num_batched_tokens=max(BATCHES) * prompt,
            threads=threads or cores(),
            seed=1,
        )
        self.prompt = prompt
        self.geometry = Geometry.of(self.llm.config.model.shape, self.llm.config.model.name)
        self._random = random.Random(seed)  # noqa: S311 - prompts are no secret
        self._vocab = self.llm.config.model.shape.vocab
        self._block_size = self.llm.config.cache.block_size
        self._requests = 0

    def run(self, ratios: Sequence[float], repeats: int) -> EngineResult:
        """Calibrate on prompts without hits, then measure every ratio `repeats` times in a random order."""
        self._first_token([self._token() for _ in range(self.prompt)])
        fitted = [step for _ in range(max(1, repeats // 2)) for step in self._cold_steps()]
        held = self._cold_steps()
        source = f"{self.geometry.name} on {cpu_name()}, {self.llm.config.threads} threads, prompts without hits"
        model = StepModel.fit(fitted, source)
        measured = self._measure(ratios, repeats)
        return self._compare(model, model.score(held), ratios, measured)

    def _cold_steps(self) -> list[MeasuredStep]:
        """Steps of known sizes: prompts of several lengths, alone and together, and the decodes after them."""
        plans = [(max(2, int(share * self.prompt)), 1) for share in SHARES]
        plans += [(max(2, self.prompt // 8), batch) for batch in BATCHES[1:]]
        self._random.shuffle(plans)
        return [step for length, batch in plans for step in self._steps(length, batch)]

    def _steps(self, length: int, batch: int) -> list[MeasuredStep]:
        core, found = self.llm.core, []
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        for _ in range(batch):
            self._requests += 1
            tokens = [self._token() for _ in range(length)]
            name = f"step-{self._requests}"
            core.add(EngineRequest(request_id=name, prompt_token_ids=tokens, params=params, arrived_at=time.time()))
        for index in range(4):
            size = StepSize.prefill(length) if index == 0 else StepSize.decode([length + index])
            size = StepSize(*(batch * part for part in (size.tokens, size.pairs, size.context, size.rows)))
            before = core.stats().counters.scheduling.tokens_scheduled
            started = time.perf_counter()
            core.step()
            seconds = time.perf_counter() - started
            planned = core.stats().counters.scheduling.tokens_scheduled - before
            if planned != size.tokens:
                raise IntegrityError(f"a step was planned with {planned} tokens where {size.tokens} were meant")
            found.append(MeasuredStep(size, seconds))
        return found

    def _measure(self, ratios: Sequence[float], repeats: int) -> dict[float, list[tuple[float, float]]]:
        """(TTFT, TPOT) of each repetition. Every prefix is fresh, and cached by a request of its own just before."""
        found: dict[float, list[tuple[float, float]]] = {ratio: [] for ratio in ratios}
        for _ in range(repeats):
            for ratio in self._random.sample(list(ratios), len(ratios)):
                cached = self._cached(ratio)
                tokens = [self._token() for _ in range(self.prompt)]
                if cached:
                    self._first_token([*tokens[:cached], self._token()])
                found[ratio].append(self._first_token(tokens, cached, DECODED))
        return found

    def _first_token(self, tokens: list[int], cached: int = 0, decoded: int = 0) -> tuple[float, float]:
        """(TTFT, TPOT) in seconds. Raises IntegrityError when not `cached` tokens were found in the cache."""
        params = SamplingParams(max_tokens=1 + decoded, temperature=0.0, ignore_eos=True)
        completion = self.llm.generate([tokens], params)[0]
        timing = completion.timing
        if completion.cached_tokens != cached or timing is None or timing.first_token is None:
            raise IntegrityError(f"{completion.cached_tokens} tokens were cached where {cached} were meant")
        last = timing.last_token if timing.last_token is not None else timing.first_token
        return timing.first_token - timing.queued, (last - timing.first_token) / max(1, decoded)

    def _compare(
        self,
        model: StepModel,
        held_out: Residuals,
        ratios: Sequence[float],
        measured: dict[float, list[tuple[float, float]]],
    ) -> EngineResult:
        prompt, kappa = self.prompt, self.geometry.kappa_per_token * self.prompt
        ttft = {ratio: Spread.of([first for first, _ in measured[ratio]]) for ratio in ratios}
        tpot = {ratio: Spread.of([gap for _, gap in measured[ratio]]) for ratio in ratios}
        cold_ttft, cold_tpot = ttft[min(ratios)].median, tpot[min(ratios)].median
        fixed = min(cold_ttft, model.seconds(StepSize(0, 0, prompt, 1)))
        parts = FirstToken(prefill=cold_ttft, fixed=fixed)
        busy = cold_ttft + DECODED * cold_tpot
        share = (cold_ttft - fixed) / busy
        hits = []
        for ratio in ratios:
            cached = self._cached(ratio)
            saved = area_saved(cached / prompt, kappa)
            spent = ttft[ratio].median + DECODED * tpot[ratio].median
            hits.append(
                HitResult(
                    ratio=ratio,
                    cached=cached,
                    saved=saved,
                    ttft=ttft[ratio],
                    tpot=tpot[ratio],
                    by_area=parts.at(saved),
                    by_steps=model.seconds(StepSize.prefill(prompt - cached, cached)),
                    gain_bound=amdahl_bound(share),
                    gain_predicted=capacity_gain(share, saved),
                    gain_measured=busy / spent,
                )
            )
        return EngineResult(model, held_out, tuple(hits), prompt, kappa)

    def _cached(self, ratio: float) -> int:
        return hit_tokens(round(ratio * self.prompt), self.prompt, self._block_size)

    def _token(self) -> int:
        return self._random.randrange(self._vocab)
