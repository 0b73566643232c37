from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.errors import ArgumentError, SessionError
from megatrain_nb.optim import adamw, kernels
from megatrain_nb.optim.adamw import Segment, UpdateThreads, update
from megatrain_nb.optim.config import AdamWConfig
from tests import naive
from tests.optim import common

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.optim.common import F32

CONFIGS = list(common.CONFIGS.values())


@pytest.fixture(name="one")
def one_thread() -> Iterator[UpdateThreads]:
    with UpdateThreads(1) as threads:
        yield threads


def flat(seed: int, size: int) -> tuple[tuple[F32, F32, F32], F32]:
    """State and gradient."""
    rng = np.random.default_rng(seed)
    return common.state(rng, size), common.numbers(rng, size)


@st.composite
def segment_lists(draw: st.DrawFn) -> tuple[list[Segment], int]:
    """Some segments with gaps between, in any order, and the arrays' length."""
    segments: list[Segment] = []
    end = 0
    for _ in range(draw(st.integers(0, 4))):
        start = end + draw(st.integers(0, 5))
        end = start + draw(st.integers(0, common.MAX_NUMEL))
        config = draw(st.sampled_from(CONFIGS))
        segments.append(Segment(start, end, config, draw(st.integers(1, 1000))))
    return draw(st.permutations(segments)), end + draw(st.integers(0, 5))


@given(drawn=segment_lists(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=common.MAX_EXAMPLES, deadline=None)
def test_segments_as_torch_and_gaps_untouched(
    drawn: tuple[list[Segment], int], seed: int
) -> None:
    segments, size = drawn
    state, grad = flat(seed, size)
    want = [x.copy() for x in state]
    for s in segments:
        part = slice(s.start, s.stop)
        new = common.by_torch(
            state[0][part],
            state[1][part],
            state[2][part],
            grad[part],
            config=s.config,
            step=s.step,
            grad_scale=0.37,
        )
        for x, y in zip(want, new, strict=True):
            x[part] = y
    # np.errstate is the interpreted kernel's, and is known in this thread only.
    num_threads = 1 if common.INTERPRETED else 3
    with np.errstate(all="ignore"), UpdateThreads(num_threads) as threads:
        update(*state, grad, segments, grad_scale=0.37, threads=threads)
    common.assert_same_bits(tuple(state), tuple(want))


def test_grad_scale_as_the_twin(one: UpdateThreads) -> None:
    state, grad = flat(0, 39)
    config = AdamWConfig(weight_decay=0.1, decoupled=False, maximize=True)
    want = naive.adamw(*state, grad, config=config, step=3, grad_scale=1 / 3)
    update(*state, grad, [Segment(0, 39, config, 3)], grad_scale=1 / 3, threads=one)
    common.assert_same_bits(tuple(state), want)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("chunk", [16, 48, 1024])
def test_chunks_and_threads_leave_no_trace(
    num_threads: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "CHUNK", chunk)
    size = 39 if common.INTERPRETED else 20_007
    state, grad = flat(1, size)
    config = common.CONFIGS["decay"]
    want = common.by_torch(*state, grad, config=config, step=5)
    with UpdateThreads(num_threads) as threads:
        update(*state, grad, [Segment(0, size, config, 5)], threads=threads)
    common.assert_same_bits(tuple(state), want)


@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("size", [1, 10**6 + 1, 4 * 2**20, 10**8])
def test_chunks_keep_the_tail_last_and_leave_a_share_to_each_thread(
    num_threads: int, size: int
) -> None:
    segment = Segment(5, 5 + size, AdamWConfig(), 1)
    chunk = adamw.chunk_of([segment], num_threads)
    assert chunk % kernels.LANES == 0
    assert chunk % BLOCK == 0
    assert adamw.SHORTEST <= chunk <= adamw.CHUNK
    if num_threads > 1 and size > adamw.SHORTEST * adamw.SHARES * num_threads:
        assert -(-size // chunk) >= adamw.SHARES * num_threads - 1


def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(2, timeout=10)
    seen: set[int] = set()

    def kernel(*_: object) -> None:
        seen.add(threading.get_ident())
        meet.wait()

    monkeypatch.setattr(kernels, "adamw", kernel)
    monkeypatch.setattr(adamw, "CHUNK", 16)
    with UpdateThreads(2) as threads:
        state, grad = flat(0, 32)
        update(*state, grad, [Segment(0, 32, AdamWConfig(), 1)], threads=threads)
    assert len(seen) == 2


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("where", ["caller", "worker"])
def test_exception_surfaces_and_the_rest_is_dropped(
    num_threads: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    caller = threading.get_ident()
    failed = threading.Event()

    def kernel(*_: object) -> None:
        calls.append(None)
        here = "caller" if threading.get_ident() == caller else "worker"
        if num_threads == 1 or here == where:
            failed.set()
            raise ZeroDivisionError("boom")
        failed.wait(10)

    monkeypatch.setattr(kernels, "adamw", kernel)
    monkeypatch.setattr(adamw, "CHUNK", 16)
    with UpdateThreads(num_threads) as threads:
        state, grad = flat(0, 1600)
        with pytest.raises(ZeroDivisionError, match="boom"):
            update(*state, grad, [Segment(0, 1600, AdamWConfig(), 1)], threads=threads)
        assert len(calls) < 100
        monkeypatch.undo()
        state, grad = flat(0, 40)
        update(*state, grad, [Segment(0, 40, AdamWConfig(), 1)], threads=threads)


def test_close_is_idempotent_and_final() -> None:
    threads = UpdateThreads(2)
    threads.close()
    threads.close()
    state, grad = flat(0, 8)
    with pytest.raises(SessionError, match="closed"):
        update(*state, grad, [Segment(0, 8, AdamWConfig(), 1)], threads=threads)


def test_default_is_the_usable_cores() -> None:
    with UpdateThreads() as threads:
        assert 1 <= threads.num_threads <= (os.cpu_count() or 1)


@pytest.mark.parametrize("num_threads", [0, -1])
def test_too_few_threads(num_threads: int) -> None:
    with pytest.raises(ArgumentError, match=f"num_threads={num_threads}"):
        UpdateThreads(num_threads)


BAD_ARRAYS = {
    "float64": (np.zeros(8), "float64"),
    "short": (np.zeros(7, np.float32), r"of shape .*\(7,\)"),
    "two-dimensional": (np.zeros((2, 4), np.float32), r"\(2, 4\)"),
    "strided": (np.zeros(16, np.float32)[::2], "not contiguous"),
    "a list": ([0.0] * 8, "list"),
}


@pytest.mark.parametrize("which", ["exp_avg", "exp_avg_sq", "grad", "param"])
@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_bad_arrays_are_refused(kind: str, which: str, one: UpdateThreads) -> None:
    bad, what = BAD_ARRAYS[kind]
    names = ("param", "exp_avg", "exp_avg_sq", "grad")
    arrays: dict[str, Any] = {name: np.ones(8, np.float32) for name in names}
    arrays[which] = bad
    # The parameter's own length is the measure of the others.
    at_fault = "exp_avg" if (which, kind) == ("param", "short") else which
    about = rf"{at_fault} is .*{what}"
    with pytest.raises(ArgumentError, match=about):
        update(
            arrays["param"],
            arrays["exp_avg"],
            arrays["exp_avg_sq"],
            arrays["grad"],
            [Segment(0, 8, AdamWConfig(), 1)],
            threads=one,
        )


def test_read_only_state_is_refused_but_not_a_read_only_gradient(
    one: UpdateThreads,
) -> None:
    (param, exp_avg, exp_avg_sq), grad = flat(0, 8)
    grad.flags.writeable = False
    segments = [Segment(0, 8, AdamWConfig(), 1)]
    update(param, exp_avg, exp_avg_sq, grad, segments, threads=one)
    exp_avg_sq.flags.writeable = False
    with pytest.raises(ArgumentError, match="exp_avg_sq is read-only"):
        update(param, exp_avg, exp_avg_sq, grad, segments, threads=one)


@pytest.mark.parametrize(
    ("spans", "what"),
    [
        ([(0, 9)], "0:9 is not within"),
        ([(-1, 4)], "-1:4 is not within"),
        ([(5, 4)], "5:4 is not within"),
        ([(3, 8), (0, 4)], "3:8 overlaps .* ends at 4"),
    ],
)
def test_bad_segments_change_nothing(
    spans: list[tuple[int, int]], what: str, one: UpdateThreads
) -> None:
    state, grad = flat(0, 8)
    before = tuple(x.copy() for x in state)
    segments = [Segment(start, stop, AdamWConfig(), 1) for start, stop in spans]
    with pytest.raises(ArgumentError, match=what):
        update(*state, grad, segments, threads=one)
    common.assert_same_bits(tuple(state), before)


def test_bad_step_changes_nothing(one: UpdateThreads) -> None:
    state, grad = flat(0, 16)
    before = tuple(x.copy() for x in state)
    segments = [Segment(0, 8, AdamWConfig(), 1), Segment(8, 16, AdamWConfig(), 0)]
    with pytest.raises(ArgumentError, match="step=0"):
        update(*state, grad, segments, threads=one)
    common.assert_same_bits(tuple(state), before)


def test_warm_up_leaves_nothing_to_compile() -> None:
    adamw.warm_up()
    if common.INTERPRETED:
        return
    known = len(kernels.adamw.signatures)  # type: ignore[attr-defined]
    with UpdateThreads(1) as threads:
        state, grad = flat(0, 24)
        update(*state, grad, [Segment(3, 24, AdamWConfig(), 1)], threads=threads)
    assert len(kernels.adamw.signatures) == known  # type: ignore[attr-defined]
