from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatrain_nb.codec.split import Split, join, split
from megatrain_nb.errors import ArgumentError
from tests.optim.common import INTERPRETED, MAX_EXAMPLES

U32 = NDArray[np.uint32]
STRIDE = 1_000_003 if INTERPRETED else 1009  # prime: every lower half comes up


def halves_of(bits: U32) -> Split:
    halves = Split(np.zeros(bits.size, np.uint16), np.zeros(bits.size, np.uint16))
    with np.errstate(all="ignore"):  # only the interpreted kernel would warn
        split(bits.view(np.float32), halves)
    return halves


def joined(halves: Split) -> U32:
    back = np.zeros(halves.size, np.float32)
    with np.errstate(all="ignore"):
        join(halves, back)
    return back.view(np.uint32)


def by_torch(bits: U32) -> NDArray[np.uint16]:
    halves = torch.from_numpy(bits.view(np.float32)).bfloat16().view(torch.int16)
    return np.asarray(halves.numpy().view(np.uint16))


def patterns() -> U32:
    """A part of all fp32 patterns, and those where a rule of [Note: split] begins or ends."""
    edges = [0, 0x8000, 0x7F7F8000, 0x7F800000, 0x7F808000, 0x7F810000, 0x7FC00000]
    edges += [0x7FFF8000, 0x00800000]
    near = np.array(edges)[:, None] + np.arange(-3, 4)
    ties = np.arange(0, 2**15, 509) * 2**16 + 0x8000
    half = np.concatenate([np.arange(0, 2**31, STRIDE), near.ravel() % 2**31, ties])
    return np.concatenate([half, half + 2**31]).astype(np.uint32)


def test_every_class_of_float_comes_back() -> None:
    bits = patterns()
    assert np.array_equal(joined(halves_of(bits)), bits)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
@settings(max_examples=MAX_EXAMPLES, deadline=None)
def test_any_pattern_comes_back(values: list[int]) -> None:
    bits = np.array(values, np.uint32)
    assert np.array_equal(joined(halves_of(bits)), bits)


def test_no_two_numbers_share_their_halves() -> None:
    bits = np.unique(patterns())
    halves = halves_of(bits)
    pairs = halves.hi.astype(np.uint32) << np.uint32(16) | halves.lo
    assert np.unique(pairs).size == bits.size


def test_upper_half_is_torchs_bf16_except_at_ties() -> None:
    bits = patterns()
    hi, want = halves_of(bits).hi, by_torch(bits)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    tie = (bits & 0xFFFF) == 0x8000
    to_even = tie & (bits >> 16 & 1 == 0) & ~nan
    assert to_even.sum() >= 10
    other = ~nan & ~to_even
    assert np.array_equal(hi[other], want[other])
    assert np.array_equal(hi[to_even], want[to_even] + 1)  # further from zero


def test_a_quiet_nan_stays_a_nan_and_nothing_else_becomes_one() -> None:
    bits = patterns()
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    quiet = nan & (bits & 0x400000 != 0)
    became_nan = (halves_of(bits).hi & 0x7FFF) > 0x7F80
    assert became_nan[quiet].all()
    assert not became_nan[~nan].any()
    lost = bits[nan & ~became_nan]
    assert lost.size >= 10
    assert set(np.unique(lost >> 16)) == {0x7F80, 0xFF80}


def test_parts_are_views() -> None:
    halves = Split(np.zeros(8, np.uint16), np.zeros(8, np.uint16))
    halves.part(slice(2, 4)).hi[:] = 7
    assert halves.part(slice(2, 4)).size == 2
    assert list(halves.hi) == [0, 0, 7, 7, 0, 0, 0, 0]


def good() -> tuple[NDArray[np.float32], Split]:
    return np.ones(4, np.float32), Split(np.ones(4, np.uint16), np.ones(4, np.uint16))


SIGNED: Any = np.zeros(4, np.int16)
BAD: dict[str, tuple[Any, Any, str]] = {
    "float64": (np.zeros(4), good()[1], "master is float64"),
    "signed": (good()[0], Split(SIGNED, good()[1].lo), "hi is int16"),
    "short": (
        good()[0],
        Split(good()[1].hi, np.zeros(3, np.uint16)),
        r"lo is .*\(3,\)",
    ),
    "strided": (np.zeros(8, np.float32)[::2], good()[1], "master is not contiguous"),
    "not a Split": (good()[0], good()[1].hi, "a ndarray; give a Split"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_arrays_are_refused(kind: str) -> None:
    master, halves, what = BAD[kind]
    with pytest.raises(ArgumentError, match=what):
        split(master, halves)
    with pytest.raises(ArgumentError, match=what):
        join(halves, master)


def test_only_what_is_written_must_be_writeable() -> None:
    master, halves = good()
    master.flags.writeable = False
    split(master, halves)
    with pytest.raises(ArgumentError, match="master is read-only"):
        join(halves, master)
    halves.lo.flags.writeable = False
    with pytest.raises(ArgumentError, match="lo is read-only"):
        split(master, halves)
    join(halves, np.zeros(4, np.float32))
