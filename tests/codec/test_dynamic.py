from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_nb.codec import base
from megatrain_nb.codec.base import Key
from megatrain_nb.codec.dynamic import (
    DEFAULT_BUDGET,
    PATIENCE,
    Part,
    Role,
    choose,
    direction_error,
    role_of,
    total_bytes,
    total_error,
)
from megatrain_nb.errors import ArgumentError
from tests.codec.common import moments

BODY = Role.BODY.codecs
ERRORS = st.lists(st.floats(0, 2), min_size=3, max_size=3).map(
    lambda values: dict(zip(BODY, values, strict=True))
)


def part(name: str, errors: dict[str, float], numel: int = 128_000) -> Part:
    return Part(name=name, numel=numel, role=Role.BODY, errors=errors)


def parts_of(errors: list[dict[str, float]]) -> list[Part]:
    return [part(f"block.{k}", each) for k, each in enumerate(errors)]


def measured(octaves: float, name: str = "w") -> Part:
    m, v = moments(np.random.default_rng(0), 128 * 400, octaves)
    errors = {
        codec: direction_error(base.get(codec), m, v, Key(0, 1, 2)) for codec in BODY
    }
    return part(name, errors)


@given(st.lists(ERRORS, max_size=6), st.floats(0.01, 2))
@settings(max_examples=200, deadline=None)
def test_within_the_budget_wherever_that_is_possible(
    errors: list[dict[str, float]], budget: float
) -> None:
    parts = parts_of(errors)
    choice = choose(parts, budget=budget)
    least = math.sqrt(
        sum(min(p.errors.values()) ** 2 * p.numel for p in parts)
        / max(1, sum(p.numel for p in parts))
    )
    assert total_error(parts, choice) <= max(budget, least) * (1 + 1e-9)


@given(st.lists(ERRORS, min_size=1, max_size=4), st.floats(0.05, 1))
@settings(max_examples=100, deadline=None)
def test_at_most_one_part_more_than_the_best_of_all_choices(
    errors: list[dict[str, float]], budget: float
) -> None:
    parts = parts_of(
        [dict(zip(BODY, sorted(e.values(), reverse=True), strict=True)) for e in errors]
    )
    fitting = [
        total_bytes(parts, dict(zip((p.name for p in parts), names, strict=True)))
        for names in itertools.product(BODY, repeat=len(parts))
        if total_error(parts, dict(zip((p.name for p in parts), names, strict=True)))
        <= budget
    ]
    if not fitting:
        return
    span = base.get("4bit").encoded_bytes(128_000) - base.get("2bit").encoded_bytes(
        128_000
    )
    ours = total_bytes(parts, choose(parts, budget=budget))
    assert ours <= min(fitting) + span * max(1, len(parts) - 1)


def test_a_looser_budget_never_takes_more() -> None:
    parts = [measured(octaves, f"b{octaves}") for octaves in (0.2, 0.7, 1.5, 3.0)]
    sizes = [
        total_bytes(parts, choose(parts, budget=budget))
        for budget in np.linspace(0.1, 1, 10)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_bits_go_where_the_errors_are() -> None:
    calm = part("calm", {"2bit": 0.2, "3bit": 0.1, "4bit": 0.05})
    wild = part("wild", {"2bit": 0.9, "3bit": 0.4, "4bit": 0.2})
    assert choose([calm, wild], budget=0.32) == {"calm": "2bit", "wild": "3bit"}


def test_a_previous_choice_is_kept_while_it_is_good() -> None:
    errors = {"2bit": 0.5, "3bit": 0.35, "4bit": 0.2}
    parts = parts_of([errors] * 40)
    fresh = choose(parts, budget=0.45)
    changed = dict(fresh)
    swap = [next(n for n, c in fresh.items() if c == k) for k in ("2bit", "3bit")]
    changed[swap[0]], changed[swap[1]] = "3bit", "2bit"
    assert choose(parts, budget=0.45, previous=changed) == changed
    everything = {p.name: "4bit" for p in parts}
    assert total_bytes(parts, everything) > total_bytes(parts, fresh) * (1 + PATIENCE)
    assert choose(parts, budget=0.45, previous=everything) == fresh
    assert choose(parts, budget=0.45, previous={p.name: "2bit" for p in parts}) == fresh
    assert choose(parts, budget=0.45, previous={"block.0": "2bit"}) == fresh


@pytest.mark.parametrize("octaves", [0.3, 1.0])
def test_default_budget_is_between_8_and_14_times_smaller(octaves: float) -> None:
    parts = [measured(octaves * (0.7 + 0.1 * k), f"b{k}") for k in range(6)]
    choice = choose(parts)
    assert total_error(parts, choice) <= DEFAULT_BUDGET
    ratio = sum(8 * p.numel for p in parts) / total_bytes(parts, choice)
    assert 8 <= ratio <= 14


def test_roles() -> None:
    assert role_of((64, 64)) is Role.BODY
    assert role_of((64, 63)) is Role.SMALL
    assert role_of((10**6,)) is Role.SMALL
    assert role_of((32_000, 64), table=True) is Role.TABLE
    table = Part(name="e", numel=10**6, role=Role.TABLE, errors={"8bit": 3.0})
    assert choose([table], budget=0.1) == {"e": "8bit"}


def test_direction_error_of_what_is_exact_is_zero() -> None:
    m, v = moments(np.random.default_rng(0), 256)
    assert direction_error(base.get("raw"), m, v, Key(0, 1, 0)) == 0
    zeros = np.zeros_like(m)
    assert direction_error(base.get("4bit"), zeros, v, Key(0, 1, 0)) == 0
    assert 0 < direction_error(base.get("8bit"), m, v, Key(0, 1, 0)) < 0.1


@pytest.mark.parametrize("budget", [0, -1, math.nan])
def test_bad_budgets(budget: float) -> None:
    with pytest.raises(ArgumentError, match="budget="):
        choose([], budget=budget)


def test_bad_parts() -> None:
    fine = {"2bit": 0.5, "3bit": 0.3, "4bit": 0.2}
    with pytest.raises(ArgumentError, match="two parts are named 'a'"):
        choose([part("a", fine), part("a", fine)])
    with pytest.raises(ArgumentError, match="error of '3bit' for 'a' is nan"):
        choose([part("a", {"2bit": 0.5, "4bit": 0.1})])
    with pytest.raises(ArgumentError, match="error of '2bit' for 'a' is inf"):
        choose([part("a", {**fine, "2bit": math.inf})])
