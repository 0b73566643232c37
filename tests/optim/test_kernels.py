from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatrain_nb.jit import kernel
from megatrain_nb.optim import kernels
from megatrain_nb.optim.config import AdamWConfig
from tests import naive
from tests.optim import common

if TYPE_CHECKING:
    from tests.optim.common import F32

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(0, common.MAX_NUMEL)


def ours(
    state: tuple[F32, F32, F32], grad: F32, config: AdamWConfig, step: int
) -> tuple[F32, F32, F32]:
    param, exp_avg, exp_avg_sq = (x.copy() for x in state)
    with np.errstate(all="ignore"):  # only the interpreted kernel would warn
        kernels.adamw(param, exp_avg, exp_avg_sq, grad, config.scalars(step))
    return param, exp_avg, exp_avg_sq


@pytest.mark.parametrize("name", common.CONFIGS)
def test_many_steps_as_torch(name: str) -> None:
    config, rng = common.CONFIGS[name], np.random.default_rng(0)
    size = common.MAX_NUMEL // 8 * 8 + 7
    mine = common.state(rng, size)
    theirs = mine
    for step in range(1, 4 if common.INTERPRETED else 40):
        grad = common.numbers(rng, size)
        mine = ours(mine, grad, config, step)
        theirs = common.by_torch(*theirs, grad, config=config, step=step)
        common.assert_same_bits(mine, theirs)


@given(seed=seeds, size=sizes, config=common.configs(), step=st.integers(1, 10**6))
@example(seed=1, size=15, config=AdamWConfig(), step=1)
@settings(max_examples=common.MAX_EXAMPLES, deadline=None)
def test_any_step_as_torch_and_twin(
    seed: int, size: int, config: AdamWConfig, step: int
) -> None:
    rng = np.random.default_rng(seed)
    state, grad = common.state(rng, size), common.numbers(rng, size)
    mine = ours(state, grad, config, step)
    common.assert_same_bits(
        mine, common.by_torch(*state, grad, config=config, step=step)
    )
    common.assert_same_bits(mine, naive.adamw(*state, grad, config=config, step=step))


@pytest.mark.parametrize("size", range(1, 35))
def test_every_tail_as_torch(size: int) -> None:
    config = common.CONFIGS["decay"]
    for seed in range(2 if common.INTERPRETED else 50):
        rng = np.random.default_rng(seed)
        state, grad = common.state(rng, size), common.numbers(rng, size)
        common.assert_same_bits(
            ours(state, grad, config, 3),
            common.by_torch(*state, grad, config=config, step=3),
        )


@pytest.mark.parametrize("name", ["decay", "small beta1", "adam", "adam no decay"])
def test_infinities_and_nans_as_torch(name: str) -> None:
    rng, config = np.random.default_rng(0), common.CONFIGS[name]
    state, grad = common.state(rng, 64), common.numbers(rng, 64)
    special = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 2e19, 1e-45], np.float32)
    grad[:56] = np.tile(special, 8)
    state[0][rng.permutation(64)[:14]] = np.tile(special, 2)
    common.assert_same_bits(
        ours(state, grad, config, 2),
        common.by_torch(*state, grad, config=config, step=2),
    )


def test_grad_scale_of_one_changes_nothing_and_grad_stays() -> None:
    rng = np.random.default_rng(0)
    state, grad = common.state(rng, 37), common.numbers(rng, 37)
    before = grad.copy()
    ours(state, grad, AdamWConfig(), 1)
    assert np.array_equal(before.view(np.int32), grad.view(np.int32))


floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(a=floats32, b=floats32, c=floats32)
@example(a=1 + 2**-12, b=1 + 2**-12, c=2.0**-60)
@example(a=1 + 2**-12, b=1 + 2**-12, c=-(2.0**-60))
@example(a=2.0**-75, b=-(2.0**-75), c=2.0**-149)
@settings(max_examples=300, deadline=None)
def test_fma_twins_round_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    with np.errstate(all="ignore"):
        x, y, z = np.float32(a), np.float32(b), np.float32(c)
        got = naive.fma(x, y, z)
        assert kernels.fma(x, y, z).view(np.int32) == got.view(np.int32)
        if not np.isfinite(got):
            assert abs(exact) > Fraction(float(np.finfo(np.float32).max))
            return
        error = abs(Fraction(float(got)) - exact)
        for towards in (-np.inf, np.inf):
            other = np.nextafter(got, np.float32(towards))
            if np.isfinite(other):
                assert error <= abs(Fraction(float(other)) - exact)


def corrections() -> list[np.float32]:
    """Roots of 1 - beta2**step, and floats at the ends of what they may be."""
    bounds = [2.0**-26, 0.5, 1 - 2**-24, 1 - 2**-23, 0.5 + 2**-24, 2 / 3, 1.0]
    roots = [
        math.sqrt(1 - beta2**step)
        for beta2 in (0.9, 0.95, 0.999, 1 - 2**-20)
        for step in (1, 2, 7, 100, 5000)
    ]
    return [np.float32(c) for c in (*bounds, *roots)]


@pytest.mark.parametrize("c", corrections()[:: 6 if common.INTERPRETED else 1])
def test_a_quotient_is_that_of_a_division(c: np.float32) -> None:
    """For every mantissa on both sides of the divisor's, and at the ends of the roots."""
    step = 2**17 + 1 if common.INTERPRETED else 1
    mantissas = np.arange(0x3F000000, 0x40000000, step, dtype=np.uint32)
    odd = [0.0, 2.0**-75, 2.0**-74.5, 2.0**64, np.inf, np.nan]
    values = np.append(mantissas.view(np.float32), np.array(odd, np.float32))
    got = np.empty_like(values)
    with np.errstate(all="ignore"):
        divide(values, c, got)
        want = values / c
    assert np.array_equal(got.view(np.int32)[:-1], want.view(np.int32)[:-1])
    assert np.isnan(got[-1])


@kernel
def divide(values: F32, divisor: np.float32, out: F32) -> None:
    by = kernels.inverse_of(divisor)
    for i in range(values.size):
        out[i] = kernels.quotient(values[i], by)


@pytest.mark.skipif(common.INTERPRETED, reason="nothing is compiled")
def test_vectorised() -> None:
    args = tuple(np.zeros(16, np.float32) for _ in range(4))
    scalars = AdamWConfig().scalars(1)
    # A fresh compilation: what the cache returns cannot be inspected.
    import numba  # noqa: PLC0415

    fresh = numba.njit(nogil=True, error_model="numpy")(kernels.adamw.py_func)  # type: ignore[attr-defined]
    fresh(*args, scalars)
    (asm,) = fresh.inspect_asm().values()
    assert asm.count("vsqrtps") + asm.count("fsqrt.4s") > 0
    assert asm.count("vdivps") + asm.count("fdiv.4s") > 0
