"""AdamW on the halves of the parameters: the same numbers as on fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_nb.codec.split import Split, join, split
from megatrain_nb.errors import ArgumentError
from megatrain_nb.optim import adamw, kernels
from megatrain_nb.optim.adamw import Segment, UpdateThreads
from megatrain_nb.optim.config import AdamWConfig
from tests.optim import common
from tests.optim.common import F32, INTERPRETED

# Starred arguments are beyond what mypy follows.
update: Any = adamw.update
kernel: Any = kernels.adamw
SIGNED: Any = np.zeros(8, np.int16)


def halved(param: F32) -> Split:
    halves = Split(np.zeros(param.size, np.uint16), np.zeros(param.size, np.uint16))
    with np.errstate(all="ignore"):
        split(param, halves)
    return halves


def whole(halves: Split) -> F32:
    param = np.zeros(halves.size, np.float32)
    with np.errstate(all="ignore"):
        join(halves, param)
    return param


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, common.MAX_NUMEL),
    config=common.configs(),
    step=st.integers(1, 10**6),
)
@settings(max_examples=common.MAX_EXAMPLES, deadline=None)
def test_any_step_as_on_fp32(
    seed: int, size: int, config: AdamWConfig, step: int
) -> None:
    rng = np.random.default_rng(seed)
    (param, *moments), grad = common.state(rng, size), common.numbers(rng, size)
    theirs, halves = [x.copy() for x in moments], halved(param)
    with np.errstate(all="ignore"):
        kernel(param, *theirs, grad, config.scalars(step))
        kernel(halves, *moments, grad, config.scalars(step))
    common.assert_same_bits((whole(halves), *moments), (param, theirs[0], theirs[1]))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_segments_and_threads_as_on_fp32(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "CHUNK", 48)
    size = 70 if INTERPRETED else 5007
    rng = np.random.default_rng(0)
    (param, *moments), grad = common.state(rng, size), common.numbers(rng, size)
    theirs, halves = [x.copy() for x in moments], halved(param)
    segments = [
        Segment(3, 30, common.CONFIGS["decay"], 5),
        Segment(32, size - 1, common.CONFIGS["adam"], 2),
    ]
    with np.errstate(all="ignore"), UpdateThreads(num_threads) as threads:
        scale = {"grad_scale": 0.37, "threads": threads}
        update(param, *theirs, grad, segments, **scale)
        update(halves, *moments, grad, segments, **scale)
    common.assert_same_bits((whole(halves), *moments), (param, theirs[0], theirs[1]))


def test_bf16_gradients_as_the_fp32_ones_they_are() -> None:
    size = 40
    rng = np.random.default_rng(0)
    state, grad = common.state(rng, size), halved(common.numbers(rng, size)).hi
    exact = (grad.astype(np.uint32) << np.uint32(16)).view(np.float32)
    theirs = tuple(x.copy() for x in state)
    segments = [Segment(0, size, AdamWConfig(), 1)]
    with np.errstate(all="ignore"), UpdateThreads(1) as threads:
        update(*theirs, exact, segments, threads=threads)
        update(*state, grad, segments, threads=threads)
    common.assert_same_bits(state, theirs)


@pytest.mark.parametrize(
    ("halves", "what"),
    [
        (Split(np.zeros(8, np.uint16), np.zeros(7, np.uint16)), r"lo is .*\(7,\)"),
        (Split(SIGNED, np.zeros(8, np.uint16)), "hi is int16"),
        (Split(np.zeros(9, np.uint16), np.zeros(9, np.uint16)), r"exp_avg is .*\(8,\)"),
    ],
)
def test_bad_halves_are_refused(halves: Split, what: str) -> None:
    other = [np.ones(8, np.float32) for _ in range(3)]
    segments = [Segment(0, 8, AdamWConfig(), 1)]
    with UpdateThreads(1) as threads, pytest.raises(ArgumentError, match=what):
        update(halves, *other, segments, threads=threads)
    assert all((x == 1).all() for x in other)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_warm_up_leaves_nothing_to_compile() -> None:
    adamw.warm_up(split=True)
    known = len(kernel.signatures)
    other = [np.zeros(24, np.float32) for _ in range(3)]
    with UpdateThreads(1) as threads:
        segments = [Segment(3, 24, AdamWConfig(), 1)]
        update(halved(other[0]), *other, segments, threads=threads)
    assert len(kernel.signatures) == known


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_vectorised() -> None:
    import numba  # noqa: PLC0415

    fresh = numba.njit(nogil=True, error_model="numpy")(kernel.py_func)
    zeros = [np.zeros(16, np.float32) for _ in range(3)]
    fresh(halved(zeros[0]), *zeros, AdamWConfig().scalars(1))
    (asm,) = fresh.inspect_asm().values()
    assert asm.count("vsqrtps") + asm.count("fsqrt.4s") > 0
    assert asm.count("vpmullq") + asm.count("vpaddq\t%zmm") == 0
