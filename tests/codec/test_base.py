"""The contract: what every codec keeps, whatever the bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_nb.codec import base
from megatrain_nb.codec.base import BLOCK, Key
from megatrain_nb.errors import ArgumentError
from tests.codec.common import decoded, encoded, moments, odd_blocks, round_trip
from tests.optim.common import MAX_EXAMPLES

NAMES = base.names()
KEYS = st.builds(
    Key,
    st.integers(0, 2**40).map(lambda block: block * BLOCK % 2**48),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


def test_names() -> None:
    assert NAMES == ("raw", "8bit", "4bit", "3bit", "2bit")
    with pytest.raises(ArgumentError, match=r"codec=.5bit. .*raw, 8bit, 4bit"):
        base.get("5bit")


@pytest.mark.parametrize("name", NAMES)
def test_config_round_trips_as_json(name: str) -> None:
    codec = base.get(name)
    config = json.loads(json.dumps(codec.to_config()))
    assert base.from_config(config) is codec
    assert name in repr(codec)
    with pytest.raises(ArgumentError, match=r"'version': 99.*release that wrote it"):
        base.from_config({**config, "version": 99})
    with pytest.raises(ArgumentError, match="'block': 64"):
        base.from_config({**config, "block": 64})


@pytest.mark.parametrize("name", NAMES)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 3 * BLOCK + 1),
    octaves=st.floats(0, 8),
    keys=st.tuples(KEYS, KEYS),
)
@settings(max_examples=MAX_EXAMPLES, deadline=None)
def test_storing_again_changes_no_byte(
    name: str, seed: int, size: int, octaves: float, keys: tuple[Key, Key]
) -> None:
    codec = base.get(name)
    first = encoded(
        codec, *moments(np.random.default_rng(seed), size, octaves), keys[0]
    )
    again = encoded(codec, *decoded(codec, first, size), keys[1])
    assert np.array_equal(first, again)


@pytest.mark.parametrize("name", NAMES)
def test_storing_odd_blocks_again_changes_no_byte(name: str) -> None:
    codec = base.get(name)
    for seed in range(20):
        for m, v in odd_blocks(np.random.default_rng(seed)):
            first = encoded(codec, m, v, Key(0, seed, 1))
            again = encoded(codec, *decoded(codec, first, BLOCK), Key(128, seed, 2))
            assert np.array_equal(first, again)


@pytest.mark.parametrize("name", NAMES)
def test_zero_m_stays_zero_and_v_is_positive(name: str) -> None:
    codec = base.get(name)
    for m, v in odd_blocks(np.random.default_rng(0)):
        new_m, new_v = round_trip(codec, m, v)
        assert not new_m[m == 0].any()
        if name != "raw":
            assert np.isfinite(new_m).all()
            assert np.isfinite(new_v).all()
            assert (new_v > 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_size_is_known_and_every_byte_written(name: str, size: int) -> None:
    codec = base.get(name)
    m, v = moments(np.random.default_rng(0), size)
    ones = np.zeros(codec.encoded_bytes(size), np.uint8)
    others = ~ones
    codec.encode(m, v, ones, Key(0, 1, 0))
    codec.encode(m, v, others, Key(0, 1, 0))
    assert np.array_equal(ones, others)


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_parts_of_the_whole(name: str) -> None:
    codec = base.get(name)
    size, cut = 5 * BLOCK + 3, 2 * BLOCK
    m, v = moments(np.random.default_rng(1), size)
    whole = decoded(codec, encoded(codec, m, v, Key(BLOCK, 3, 4)), size)
    left = round_trip(codec, m[:cut], v[:cut], Key(BLOCK, 3, 4))
    right = round_trip(codec, m[cut:], v[cut:], Key(BLOCK + cut, 3, 4))
    for one, a, b in zip(whole, left, right, strict=True):
        assert np.array_equal(one, np.concatenate([a, b]))


def test_raw_keeps_every_bit() -> None:
    patterns = np.arange(0, 2**32, 65_537 * 9).astype(np.uint32)
    m, v = patterns.view(np.float32), patterns[::-1].copy().view(np.float32)
    back = round_trip(base.get("raw"), m, v)
    assert np.array_equal(back[0].view(np.uint32), m.view(np.uint32))
    assert np.array_equal(back[1].view(np.uint32), v.view(np.uint32))


def good(name: str) -> dict[str, Any]:
    size = base.get(name).encoded_bytes(8)
    m, v = np.ones((2, 8), np.float32)
    out = np.zeros(size, np.uint8)
    return {"exp_avg": m, "exp_avg_sq": v, "out": out, "key": Key(0, 1, 0)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("which", "bad", "what"),
    [
        ("exp_avg", np.ones(8), "exp_avg is float64"),
        ("exp_avg_sq", np.ones(7, np.float32), r"exp_avg_sq is .*\(7,\)"),
        ("out", np.zeros(3, np.uint8), r"out is .*\(3,\)"),
        ("key", Key(64, 1, 0), "first=64 .* multiple of 128"),
        ("key", Key(0, -1, 0), "step=-1 .* 0 <= step"),
        ("key", Key(0, 1, 2**32), "seed=4294967296"),
    ],
)
def test_bad_arguments_write_nothing(
    name: str, which: str, bad: Any, what: str
) -> None:
    arguments = {**good(name), which: bad}
    with pytest.raises(ArgumentError, match=what):
        base.get(name).encode(**arguments)
    assert not arguments["out"].any()


def test_bad_arguments_of_decode() -> None:
    codec = base.get("4bit")
    m, v = np.ones((2, 8), np.float32)
    with pytest.raises(ArgumentError, match=r"encoded is uint8 of shape \(5,\)"):
        codec.decode(np.zeros(5, np.uint8), m, v)
    v.flags.writeable = False
    with pytest.raises(ArgumentError, match="exp_avg_sq is read-only"):
        codec.decode(np.zeros(codec.encoded_bytes(8), np.uint8), m, v)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 128, 700])
def test_blank_is_encoded_zeros_whatever_the_key(name: str, size: int) -> None:
    codec = base.get(name)
    zeros = np.zeros(size, np.float32)
    out = np.full(codec.encoded_bytes(size), 0xAA, np.uint8)
    codec.blank(out)
    for key in (Key(0, 1, 0), Key(256, 2**32 - 1, 77)):
        assert np.array_equal(out, encoded(codec, zeros, zeros, key))
    m, v = decoded(codec, out, size)
    assert not m.any()
    assert (v <= 2.0**-125).all()


@pytest.mark.parametrize("name", NAMES)
def test_passes_leave_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's way through a long array does not show."""
    codec, size = base.get(name), 9 * BLOCK + 5
    m, v = moments(np.random.default_rng(8), size)
    whole = encoded(codec, m, v, Key(BLOCK, 3, 4))
    back = decoded(codec, whole, size)
    monkeypatch.setattr("megatrain_nb.codec.quantised.blocks.PASS", 2 * BLOCK)
    assert np.array_equal(whole, encoded(codec, m, v, Key(BLOCK, 3, 4)))
    for a, b in zip(back, decoded(codec, whole, size), strict=True):
        assert np.array_equal(a, b)
