"""8 and 4 bits, compiled; see linear.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import float32 as f4
from numpy import int32 as i4
from numpy import uint16 as u2
from numpy import uint32 as u4

from megatrain_nb.codec.kernels import load, put, to_bits, to_float
from megatrain_nb.codec.quantised.block_kernels import (
    FACTORS_U4,
    M_TOP,
    OWN,
    BlockKernels,
    Scratch,
    begin_v,
    first_of,
    level_of,
    magnitude,
    narrow_kernels,
    pack_kernel,
    to_largest,
    unpack_kernel,
    v_of,
    v_of_code,
)
from megatrain_nb.codec.quantised.blocks import (
    COUNT,
    LANES,
    M_BITS,
    M_PATTERN,
    SMALLEST_SCALE,
)
from megatrain_nb.jit import inlined

if TYPE_CHECKING:
    from megatrain_nb.codec.quantised.blocks import Planes
    from megatrain_nb.codec.quantised.linear import Linear

INVERSE = OWN
"""1 / step of m, or 0."""


def linear_kernels(codec: Linear) -> BlockKernels:
    """Return the kernels of one codec."""
    x, bits = v_of(codec), codec.bits
    steps = f4(2 ** (bits - 1) - 1)
    zero = f4(steps + 1)
    pattern = u4((COUNT + zero).view(np.uint32) | M_PATTERN)
    lowest = i4((COUNT + f4(1)).view(np.int32))
    highest = i4((COUNT + f4(2 * steps + 1)).view(np.int32))

    unpack, pack = unpack_kernel(bits), pack_kernel(bits)
    narrow = narrow_kernels(x, bits)
    top_level, encode_levels, pack_v = narrow.top, narrow.encode, narrow.pack

    @inlined
    def begin_decode(planes: Planes, b: np.uintp) -> Any:
        return load(planes.scale, b), first_of(u4(planes.top[b]), x)

    @inlined
    def decode(planes: Planes, b: np.uintp, header: Any, i: int, k: int) -> Any:
        step, first = header
        m = f4(f4(f4(i4(unpack(planes.m, b, i, k))) - zero) * step)
        return m, v_of_code(first, unpack(planes.v, b, i, k), x)

    @inlined
    def level(v: np.float32, noise: np.uint32, odd: bool) -> np.uint32:
        level = level_of(v, noise, x)
        return x.widest if odd and level > x.widest else level

    @inlined
    def m_code(s: Scratch, i: int, inverse: np.float32, noise: np.uint32) -> np.uint32:
        part = to_float(u4(u4(noise & M_BITS) | pattern))
        place = i4(to_bits(f4(f4(s.m[i] * inverse) + part)))
        place = place if place > lowest else lowest
        place = place if place < highest else highest
        return u4(u4(u4(place) >> u4(15)) & u4(0xFF))

    @inlined
    def size_of(m: np.float32) -> np.uint32:
        return magnitude(m)

    def begin_encode(planes: Planes, b: np.uintp, s: Scratch) -> None:
        """Write the top of v and the scale of m."""
        begin_v(planes, b, s, top_level(s), x)
        largest = to_largest(s.number[M_TOP])
        scale = u4(to_bits(f4(largest / steps)) >> u4(16))
        step, inverse = to_float(u4(scale << u4(16))), f4(0)
        if step < SMALLEST_SCALE:
            scale = u4(0)
        else:
            inverse = f4(f4(1) / step)
        put(planes.scale, b, u2(scale))
        put(s.number, INVERSE, to_bits(inverse))

    def encode(planes: Planes, b: np.uintp, s: Scratch) -> None:
        """Write the codes."""
        encode_levels(s)
        inverse = to_float(s.number[INVERSE])
        for i in range(LANES):
            at = s.hash[i]
            m_codes = (
                m_code(s, i, inverse, u4(at * FACTORS_U4[0])),
                m_code(s, 16 + i, inverse, u4(at * FACTORS_U4[1])),
                m_code(s, 32 + i, inverse, u4(at * FACTORS_U4[2])),
                m_code(s, 48 + i, inverse, u4(at * FACTORS_U4[3])),
                m_code(s, 64 + i, inverse, u4(at * FACTORS_U4[4])),
                m_code(s, 80 + i, inverse, u4(at * FACTORS_U4[5])),
                m_code(s, 96 + i, inverse, u4(at * FACTORS_U4[6])),
                m_code(s, 112 + i, inverse, u4(at * FACTORS_U4[7])),
            )
            pack(planes.m, b, i, m_codes)
            pack_v(planes.v, b, i, s)

    def nothing_left(planes: Planes, b: np.uintp, s: Scratch) -> None:
        """All is written."""

    rest = (nothing_left,) * 5
    return BlockKernels(
        *(begin_decode, decode, level, narrow.put, narrow.cut, size_of),
        *(begin_encode, encode, *rest),
    )
