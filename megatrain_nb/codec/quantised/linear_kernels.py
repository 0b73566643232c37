"""8 and 4 bits, compiled; see linear.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import float32 as f4
from numpy import int32 as i4
from numpy import uint8 as u1
from numpy import uint16 as u2
from numpy import uint32 as u4

from megatrain_nb.codec.kernels import load, to_bits, to_float
from megatrain_nb.codec.quantised.block_kernels import (
    BlockKernels,
    Scratch,
    code_of,
    first_of,
    level_of,
    range_of,
    to_largest,
    v_of,
    v_of_code,
)
from megatrain_nb.codec.quantised.blocks import (
    COUNT,
    HALF,
    M_BITS,
    M_PATTERN,
    SMALLEST_SCALE,
)
from megatrain_nb.jit import inlined

if TYPE_CHECKING:
    from megatrain_nb.codec.quantised.blocks import Planes
    from megatrain_nb.codec.quantised.linear import Linear


def linear_kernels(codec: Linear) -> BlockKernels:
    """Return the kernels of one codec."""
    x, bits = v_of(codec), codec.bits
    steps = f4(2 ** (bits - 1) - 1)
    zero = f4(steps + 1)
    pattern = u4((COUNT + zero).view(np.uint32) | M_PATTERN)
    lowest = i4((COUNT + f4(1)).view(np.int32))
    highest = i4((COUNT + f4(2 * steps + 1)).view(np.int32))

    @inlined
    def begin_decode(planes: Planes, b: int, s: Scratch) -> Any:
        return load(planes.scale, b), first_of(u4(planes.top[b]), x)

    @inlined
    def decode(planes: Planes, b: int, s: Scratch, header: Any, i: int) -> Any:
        step, first = header
        m_0, v_0 = u4(planes.m[b, i]), u4(planes.v[b, i])
        if bits == 4:
            m_1, v_1 = u4(m_0 >> u4(4)), u4(v_0 >> u4(4))
            m_0, v_0 = u4(m_0 & u4(15)), u4(v_0 & u4(15))
        else:
            m_1, v_1 = u4(planes.m[b, i + HALF]), u4(planes.v[b, i + HALF])
        return (
            f4(f4(f4(i4(m_0)) - zero) * step),
            f4(f4(f4(i4(m_1)) - zero) * step),
            v_of_code(first, v_0, x),
            v_of_code(first, v_1, x),
        )

    @inlined
    def level(v: np.float32, noise: np.uint32) -> np.uint32:
        return level_of(v, noise, x)

    @inlined
    def begin_encode(planes: Planes, b: int, s: Scratch, largest: np.uint32) -> Any:
        top, first, most = range_of(s, x)
        scale = u4(to_bits(f4(to_largest(largest) / steps)) >> u4(16))
        step, inverse = to_float(u4(scale << u4(16))), f4(0)
        if step < SMALLEST_SCALE:
            scale = u4(0)
        else:
            inverse = f4(f4(1) / step)
        planes.scale[b], planes.top[b] = u2(scale), u1(top)
        return inverse, first, most

    @inlined
    def m_code(m: np.float32, inverse: np.float32, noise: np.uint32) -> np.uint32:
        part = to_float(u4(u4(noise & M_BITS) | pattern))
        place = i4(to_bits(f4(f4(m * inverse) + part)))
        place = place if place > lowest else lowest
        place = place if place < highest else highest
        return u4(u4(u4(place) >> u4(15)) & u4(0xFF))

    @inlined
    def encode(planes: Planes, b: int, s: Scratch, state: Any, i: int) -> np.uint32:
        j, (inverse, first, most) = i + HALF, state
        m_0 = m_code(s.m[i], inverse, s.noise[i])
        m_1 = m_code(s.m[j], inverse, s.noise[j])
        v_0 = code_of(first, s.v_code[i], most)
        v_1 = code_of(first, s.v_code[j], most)
        if bits == 4:
            planes.m[b, i] = u1(m_0 | u4(m_1 << u4(4)))
            planes.v[b, i] = u1(v_0 | u4(v_1 << u4(4)))
        else:
            planes.m[b, i], planes.m[b, j] = u1(m_0), u1(m_1)
            planes.v[b, i], planes.v[b, j] = u1(v_0), u1(v_1)
        return u4(0)

    @inlined
    def end_encode(planes: Planes, b: int, s: Scratch, largest: Any) -> None:
        """Nothing is left."""

    return BlockKernels(begin_decode, decode, level, begin_encode, encode, end_encode)
