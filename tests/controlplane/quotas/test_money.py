"""Costs in whole micro-units: exact sums, rounding as stated, the price that was in force."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.quotas.money import Rounding, Use, cost, price_at, reserved, settled
from controlplane.quotas.schemas import Price

EUR = Price(
    pool="", uncached_input=2_000_000, cached_input=500_000, output=8_000_000, device_second=300, valid_from=0.0
)
tokens = st.integers(0, 10**9)
rates = st.integers(0, 10**12)


def test_a_cost_is_what_the_price_list_says() -> None:
    """Two euros a million tokens is two micro-euros each."""
    assert cost(EUR, Use(uncached_input=1000, cached_input=1000, output=100)) == 2000 + 500 + 800
    assert cost(EUR, Use(device_seconds=2.5)) == 750
    assert cost(None, Use(uncached_input=10**9)) == 0


@pytest.mark.parametrize(
    ("output", "settled_as", "reserved_as"),
    [(0, 0, 0), (1, 0, 1), (2, 0, 1), (3, 1, 1), (4, 1, 1), (5, 1, 2), (6, 2, 2), (10, 2, 3)],
)
def test_rounding_is_up_at_reservation_and_half_to_even_at_settlement(
    output: int, settled_as: int, reserved_as: int
) -> None:
    quarter = replace(EUR, output=250_000)
    assert cost(quarter, Use(output=output)) == settled_as
    assert cost(quarter, Use(output=output), Rounding.UP) == reserved_as


@given(uncached=tokens, cached=tokens, output=tokens, seconds=st.floats(0, 1e6), a=rates, b=rates, c=rates, d=rates)
def test_a_cost_is_the_exact_sum_rounded_once(
    uncached: int, cached: int, output: int, seconds: float, a: int, b: int, c: int, d: int
) -> None:
    price = replace(EUR, uncached_input=a, cached_input=b, output=c, device_second=d)
    use = Use(uncached_input=uncached, cached_input=cached, output=output, device_seconds=seconds)
    exact = Fraction(uncached * a + cached * b + output * c, 10**6) + Fraction(round(seconds * 1e9) * d, 10**9)
    assert cost(price, use) == round(exact)
    assert cost(price, use, Rounding.UP) == -((-exact.numerator) // exact.denominator)


@given(uncached=tokens, cached=tokens, output=tokens, used=st.floats(0, 1), a=rates, b=rates, c=rates)
def test_a_reservation_covers_the_settlement_whatever_was_cached(
    uncached: int, cached: int, output: int, used: float, a: int, b: int, c: int
) -> None:
    price = replace(EUR, uncached_input=a, cached_input=b, output=c)
    worst = Use(uncached_input=uncached + cached, output=output)
    actual = Use(uncached_input=uncached, cached_input=cached, output=int(output * used))
    assert settled([price], "gpu", 1.0, actual) <= reserved([price], ["gpu"], 1.0, worst)


def test_a_reservation_is_the_dearest_of_the_pools_it_may_go_to() -> None:
    dear, cheap = replace(EUR, pool="dear", output=20_000_000), replace(EUR, pool="cheap", output=1_000_000)
    use = Use(output=1000)
    assert reserved([EUR, dear, cheap], ["dear", "cheap"], 1.0, use) == 20_000
    assert reserved([EUR, dear, cheap], ["cheap"], 1.0, use) == 1000
    assert reserved([EUR, dear, cheap], ["other"], 1.0, use) == 8000
    assert reserved([], ["other"], 1.0, use) == 0


def test_the_price_in_force_is_that_of_the_pool_and_else_that_of_all() -> None:
    old = replace(EUR, valid_until=100.0)
    new = replace(EUR, valid_from=100.0, output=1)
    own = replace(EUR, pool="gpu", valid_from=150.0, valid_until=200.0)
    prices = [own, new, old]
    assert price_at(prices, "gpu", 99.999) is old
    assert price_at(prices, "gpu", 100.0) is new
    assert price_at(prices, "gpu", 150.0) is own
    assert price_at(prices, "cpu", 150.0) is new
    assert price_at(prices, "gpu", 200.0) is new
    assert price_at(prices, "gpu", -1.0) is None
    assert price_at([own], "cpu", 160.0) is None


@pytest.mark.parametrize(
    "use",
    [Use(output=-1), Use(device_seconds=-1.0), Use(device_seconds=float("nan")), Use(device_seconds=float("inf"))],
)
def test_what_no_engine_can_have_used_is_refused(use: Use) -> None:
    with pytest.raises(ValueError, match=r"negative|finite"):
        cost(EUR, use)
