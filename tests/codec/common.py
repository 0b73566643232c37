"""Moments as training leaves them, and the ways to store them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.codec import base
from megatrain_nb.codec.base import BLOCK, Key
from megatrain_nb.codec.quantised.blocks import BlockCodec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain_nb.codec.base import F32, U8, Codec

FIRST = Key(0, 1, 0)
QUANTISED = ("8bit", "4bit", "3bit", "2bit")


def quantised(name: str) -> BlockCodec:
    codec = base.get(name)
    assert isinstance(codec, BlockCodec)
    return codec


def moments(
    rng: np.random.Generator, size: int, octaves: float = 1.0
) -> tuple[F32, F32]:
    """m and v of gradients whose size differs by ``octaves`` (one sigma)."""
    sigma = np.exp2(rng.normal(-13, octaves, size))
    m = 0.23 * sigma * rng.standard_normal(size)
    v = np.square(sigma) * rng.gamma(8, 1 / 8, size)
    return m.astype(np.float32), v.astype(np.float32)


def encoded(codec: Codec, m: F32, v: F32, key: Key = FIRST) -> U8:
    out = np.full(codec.encoded_bytes(m.size), 0xAA, np.uint8)
    codec.encode(m, v, out, key)
    return out


def decoded(codec: Codec, data: U8, size: int) -> tuple[F32, F32]:
    m, v = np.full((2, size), np.nan, np.float32)
    codec.decode(data, m, v)
    return m, v


def round_trip(codec: Codec, m: F32, v: F32, key: Key = FIRST) -> tuple[F32, F32]:
    return decoded(codec, encoded(codec, m, v, key), m.size)


def odd_blocks(rng: np.random.Generator) -> list[tuple[F32, F32]]:
    """Blocks that a codec may stumble over."""
    m, v = moments(rng, BLOCK)
    zeros: NDArray[np.float32] = np.zeros(BLOCK, np.float32)
    outlier_m, outlier_v = m.copy(), v.copy()
    outlier_m[77], outlier_v[77] = 1e30, 3e38
    one = zeros.copy()
    one[5] = -3e-4
    huge = np.full(BLOCK, 3.4e38, np.float32)
    wide = np.exp2(rng.uniform(-120, 120, BLOCK)).astype(np.float32)
    infinite = v.copy()
    infinite[3] = np.inf
    return [
        (zeros, zeros),
        (zeros, v),
        (m, zeros),
        (outlier_m, outlier_v),
        (one, zeros),
        (huge * np.sign(m), huge),
        (m * np.float32(1e-38), v * np.float32(1e-34)),
        (np.full(BLOCK, 1e-45, np.float32), np.full(BLOCK, 1e-45, np.float32)),
        (wide * np.sign(m), wide),
        (np.sign(m) * np.float32(2e-4), np.full(BLOCK, 4e-8, np.float32)),
        (m, infinite),
    ]
