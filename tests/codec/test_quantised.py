"""What quantised moments must do in training, shown on the codecs alone."""

from __future__ import annotations

import json
import math
import zlib
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from megatrain_nb.codec.base import BLOCK, Key
from megatrain_nb.codec.quantised.blocks import FACTORS, dither, pack, unpack
from tests.codec.common import (
    QUANTISED,
    decoded,
    encoded,
    moments,
    quantised,
    round_trip,
)

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
LINEAR = ("8bit", "4bit")
PROJECTED = ("3bit", "2bit")


@pytest.mark.parametrize("name", QUANTISED)
def test_golden_bytes(name: str) -> None:
    i = np.arange(2 * BLOCK - 9)
    m = ((i * 37 % 101 - 50) * 2.0**-16).astype(np.float32)
    v = ((1 + i * 29 % 97) ** 2 * 2.0**-34).astype(np.float32)
    got = encoded(quantised(name), m, v, Key(BLOCK, 7, 0xC0FFEE)).tobytes().hex()
    assert got == GOLDEN[name]


@pytest.mark.parametrize("name", QUANTISED)
def test_what_was_encoded_with_another_dither_is_read_as_before(name: str) -> None:
    """The dither is no part of the format."""
    golden = GOLDEN[f"{name} with the first dither"]
    data = np.frombuffer(bytes.fromhex(golden["encoded"]), np.uint8).copy()
    m, v = decoded(quantised(name), data, 2 * BLOCK - 9)
    found = [zlib.crc32(m.tobytes()), zlib.crc32(v.tobytes())]
    assert found == golden["crc32 of m, v"]
    assert np.array_equal(encoded(quantised(name), m, v), data)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_planes_unpack_to_what_was_packed(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (5, BLOCK)).astype(np.uint32)
    packed = pack(codes, bits)
    assert packed.shape == (5, 16 * bits)
    assert np.array_equal(unpack(packed, bits), codes)


@pytest.mark.parametrize(
    ("name", "ratio"), [("8bit", 3.9), ("4bit", 7.7), ("3bit", 10), ("2bit", 14.5)]
)
def test_size_with_a_tiles_header_and_padding(name: str, ratio: float) -> None:
    numel = 256 * 1024  # the smallest piece worth a read of its own
    on_disk = -(-(quantised(name).encoded_bytes(numel) + 64) // 4096) * 4096
    assert 8 * numel / on_disk >= ratio


# ---------------------------------------------------------------- dither


def test_dither_is_uniform_and_pairs_are_independent() -> None:
    noise = np.concatenate([dither(Key(0, step, 9), 64) for step in range(16)])
    for values, stop in (
        (noise >> 9, 2**23),
        (noise >> 12, 2**20),
        (noise >> 7 & 0xFF, 2**8),
    ):
        unit = (values + 0.5) / stop
        four_sigma = 4 / np.sqrt(12 * unit.size)
        assert abs(unit.mean() - 0.5) < four_sigma
        assert abs(unit.var() - 1 / 12) < four_sigma
        centred = (unit - 0.5) * np.sqrt(12)
        limit = 4 / np.sqrt(unit.size)
        lags = [(1, lag) for lag in (1, 2, *range(16, BLOCK, 16))]
        for axis, lag in (*lags, (0, 1), (0, 64)):
            shifted = np.roll(centred, lag, axis)
            assert abs((centred * shifted).mean()) < limit, (axis, lag)
    high, low = (noise >> 9) / 2**23 - 0.5, (noise >> 7 & 0xFF) / 2**8 - 0.5
    assert abs((high * low).mean() * 12) < 4 / np.sqrt(noise.size)


def shortest(factor: int, bits: int) -> float:
    """The shortest vector of (i, factor * i) modulo 2**bits, over the longest possible."""
    a, b = np.array([2**bits, 0], object), np.array([factor % 2**bits, 1], object)
    while True:  # Gauss
        b = b - a * round(Fraction(int(a @ b), int(a @ a)))
        if b @ b >= a @ a:
            return float(math.sqrt(a @ a / (2 / math.sqrt(3) * 2**bits)))
        a, b = b, a


@pytest.mark.parametrize("bits", [32, 15])
def test_elements_that_share_a_hash_pass_the_spectral_test(bits: int) -> None:
    for first, second in combinations(FACTORS, 2):
        assert shortest(second * pow(first, -1, 2**bits), bits) >= 0.75


def test_m_rounds_in_pairs_as_if_independent() -> None:
    """Over all hashes: both below any two thresholds, against the product."""
    hashes = np.arange(2**15, dtype=np.uint32)
    dithers = [(hashes * np.uint32(factor) >> 7) & 0xFF for factor in FACTORS]
    area = np.outer(np.arange(1, 257), np.arange(1, 257)) / 2**16
    for first, second in combinations(dithers, 2):
        counts = np.bincount(first * 256 + second, minlength=2**16).reshape(256, 256)
        below = counts.cumsum(0).cumsum(1) / 2**15
        assert abs(below - area).max() < 0.001


def test_dither_counts_on_from_block_to_block() -> None:
    whole = dither(Key(0, 5, 6), 8)
    assert np.array_equal(whole[3:], dither(Key(3 * BLOCK, 5, 6), 5))
    assert not np.array_equal(whole, dither(Key(0, 6, 6), 8))
    assert not np.array_equal(whole, dither(Key(0, 5, 7), 8))


def average(name: str, m: np.ndarray, v: np.ndarray, rounds: int) -> tuple:  # type: ignore[type-arg]
    both = [
        round_trip(quantised(name), m, v, Key(0, step, 3)) for step in range(rounds)
    ]
    return tuple(
        np.mean([pair[k] for pair in both], axis=0, dtype=float) for k in (0, 1)
    )


@pytest.mark.parametrize("name", QUANTISED)
def test_rounding_of_v_is_without_bias(name: str) -> None:
    rng, rounds = np.random.default_rng(0), 600
    v = (1e-9 * np.exp2(rng.uniform(-2.5, 0, 4 * BLOCK))).astype(np.float32)
    _, mean = average(name, v, v, rounds)
    # A rounding to 1 or 4 has at most a deviation of 0.75 of the number.
    assert abs(mean / v - 1).max() < 5 * 0.75 / np.sqrt(rounds)
    assert abs((mean / v).mean() - 1) < 5 * 0.75 / np.sqrt(rounds * v.size)


@pytest.mark.parametrize("name", LINEAR)
def test_rounding_of_m_is_without_bias(name: str) -> None:
    rounds = 600
    m, v = moments(np.random.default_rng(0), 4 * BLOCK, 0.3)
    mean, _ = average(name, m, v, rounds)
    largest = np.repeat(abs(m.reshape(-1, BLOCK)).max(axis=1), BLOCK)
    step = largest / {"8bit": 127, "4bit": 7}[name]
    inside = abs(m) < largest - step
    assert (abs(mean - m) / step)[inside].max() < 5 * 0.5 / np.sqrt(rounds)
    bias = ((mean - m) / step)[inside].mean()
    assert abs(bias) < 5 * 0.5 / np.sqrt(rounds * m.size)


# -------------------------------------------------------------- over time


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED)
def test_v_follows_increments_of_a_thousandth(name: str) -> None:
    size, beta2 = 256 * BLOCK, np.float32(0.999)
    v = np.full(size, 1e-10, np.float32)
    grad_sq = np.float32(4e-10)
    m = np.zeros(size, np.float32)
    for step in range(1, 1501):
        v = v * beta2 + (np.float32(1) - beta2) * grad_sq
        _, v = round_trip(quantised(name), m, v, Key(0, step, 1))
        if step in {100, 500, 1500}:
            exact = 4e-10 - 3e-10 * 0.999**step
            assert v.mean(dtype=float) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("octaves", [0.3, 2.0])
def test_without_gradients_m_dies_and_the_drift_is_fp32s(
    name: str, octaves: float
) -> None:
    exact_m, exact_v = moments(np.random.default_rng(0), 64 * BLOCK, octaves)
    m, v = round_trip(quantised(name), exact_m, exact_v)
    exact_m, exact_v = m, v
    drift = exact = 0.0
    for step in range(1, 201):
        m, v = m * np.float32(0.9), v * np.float32(0.999)
        exact_m, exact_v = exact_m * np.float32(0.9), exact_v * np.float32(0.999)
        drift += float((abs(m) / np.sqrt(v)).sum())
        exact += float((abs(exact_m) / np.sqrt(exact_v)).sum())
        m, v = round_trip(quantised(name), m, v, Key(0, step, 1))
    assert drift <= 1.1 * exact
    assert abs(m).max() <= 1.01 * abs(exact_m).max() + 1e-12


@pytest.mark.parametrize("name", LINEAR)
def test_the_largest_m_of_a_block_does_not_grow(name: str) -> None:
    for octaves in (0, 1, 6):
        m, v = moments(np.random.default_rng(octaves), 64 * BLOCK, octaves)
        new, _ = round_trip(quantised(name), m, v)
        tops = (abs(x.reshape(-1, BLOCK)).max(axis=1) for x in (new, m))
        assert np.less_equal(*tops).all()


@pytest.mark.parametrize("name", PROJECTED)
def test_m_relative_to_the_root_of_v_does_not_get_longer(name: str) -> None:
    codec = quantised(name)
    for octaves in (0, 1, 6):
        m, v = moments(np.random.default_rng(octaves), 64 * BLOCK, octaves)
        data = encoded(codec, m, v)
        new, _ = round_trip(codec, m, v)
        codes = unpack(codec.planes(data).v, codec.bits)
        root = np.exp2((codes * 2.0 ** (codec.shift - 23)) // 2)
        before = np.linalg.norm(m.reshape(-1, BLOCK) * root, axis=1)
        after = np.linalg.norm(new.reshape(-1, BLOCK) * root, axis=1)
        assert (after <= before * (1 + 2.0**-13)).all()


def test_what_is_below_the_range_of_v_is_stored_as_its_end() -> None:
    v = np.full(BLOCK, 2.0**-60, np.float32)
    v[0] = 2.0**-20
    m = np.zeros(BLOCK, np.float32)
    for name, octaves in (("4bit", 15), ("3bit", 7)):
        _, new = round_trip(quantised(name), m, v)
        assert (new[1:] == 2.0 ** (-20 - octaves)).all()
