"""What a gateway has seen of a model: how large its requests turn out to be, and how fast they are served.

Layer: scheduling. Pure. A request's size is only known when the engine has counted it; until then it is estimated from
what requests before it turned out to be. The speed is a straight line through the times to first token that were seen,
by the tokens that had to be computed; it serves where no step model of the pool was published.
"""

from __future__ import annotations

from collections import OrderedDict

from controlplane.admission.prediction import StepCost

REMEMBERED = 64
"""Requests that an average looks back on."""
LEAST_SEEN = 8
"""First tokens needed before a speed is told."""
MOST_TENANTS = 1024
TOKENS_PER_BYTE = 0.25
TYPICAL_OUTPUT = 256.0
TYPICAL_HOLD_S = 1.0
MOST_S = 3600.0
"""Longer times are mistakes and left out (F22)."""


class Average:
    """A mean in which the newest REMEMBERED weigh in."""

    __slots__ = ("n", "value")

    def __init__(self, first: float) -> None:
        self.value = first
        self.n = 0

    def add(self, value: float) -> None:
        self.n += 1
        self.value += (value - self.value) / min(self.n, REMEMBERED)


class Line:
    """Least squares of y = fixed + slope · x over about the latest REMEMBERED, neither of the two negative."""

    __slots__ = ("_x", "_xx", "_xy", "_y", "n")

    def __init__(self) -> None:
        self.n = 0
        self._x, self._y, self._xx, self._xy = Average(0.0), Average(0.0), Average(0.0), Average(0.0)

    def add(self, x: float, y: float) -> None:
        self.n += 1
        for average, value in ((self._x, x), (self._y, y), (self._xx, x * x), (self._xy, x * y)):
            average.add(value)

    def fit(self) -> tuple[float, float]:
        """(fixed, slope). Where x hardly varied the slope bears all of it."""
        x, y = self._x.value, self._y.value
        spread = self._xx.value - x * x
        if x <= 0:
            return max(0.0, y), 0.0
        slope = (self._xy.value - x * y) / spread if spread > 1e-6 * self._xx.value else y / x
        if slope < 0:
            return y, 0.0
        fixed = y - slope * x
        return (fixed, slope) if fixed >= 0 else (0.0, y / x)


class Pace:
    """One model's, at one gateway. Memory is bounded by MOST_TENANTS."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._per_byte = Average(TOKENS_PER_BYTE)
        self._output = Average(TYPICAL_OUTPUT)
        self._hold = Average(TYPICAL_HOLD_S)
        self._first = Line()
        self._hits: OrderedDict[str, Average] = OrderedDict()

    @property
    def hold_s(self) -> float:
        """How long a request holds its place."""
        return self._hold.value

    def prompt(self, tenant: str, most: int) -> tuple[int, int]:
        """(uncached, cached) tokens expected of a prompt that has `most` at most."""
        tokens = max(1, min(most, round(most * self._per_byte.value)))
        hits = self._hits.get(tenant)
        cached = round(tokens * hits.value) if hits is not None else 0
        return tokens - cached, cached

    def output(self, most: int) -> int:
        """Tokens expected to be held for an answer that has `most` at most: twice the average, for half are longer."""
        return max(1, min(most, round(2 * self._output.value)))

    def counted(self, tenant: str, most: int, prompt: int, cached: int, output: int) -> None:
        """The engine has counted a request of which the prompt was bounded by `most`."""
        if prompt <= 0 or most <= 0:
            return
        self._per_byte.add(min(1.0, prompt / most))
        self._output.add(output)
        hits = self._hits.get(tenant)
        if hits is None:
            hits = self._hits[tenant] = Average(0.0)
            if len(self._hits) > MOST_TENANTS:
                self._hits.popitem(last=False)
        hits.add(cached / prompt)

    def held(self, seconds: float) -> None:
        """A request held its place so long."""
        if 0 <= seconds <= MOST_S:
            self._hold.add(seconds)

    def first_token(self, uncached: int, seconds: float) -> None:
        """A prompt of which `uncached` tokens were computed had its first token so long after it was dispatched."""
        if uncached > 0 and 0 < seconds <= MOST_S:
            self._first.add(uncached, seconds)

    def cost(self) -> StepCost | None:
        """The speed as a step model, None before enough was seen."""
        if self._first.n < LEAST_SEEN:
            return None
        fixed, slope = self._first.fit()
        return StepCost(step=0.0, tokens=slope, fixed=fixed, source=f"first tokens of {self._model}", n=self._first.n)
