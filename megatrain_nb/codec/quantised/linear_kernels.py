"""8 and 4 bits, compiled; see linear.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import float32 as f4
from numpy import int32 as i4
from numpy import uint8 as u1
from numpy import uint32 as u4

from megatrain_nb.codec.kernels import load, to_bits, to_float
from megatrain_nb.codec.quantised.block_kernels import (
    BlockKernels,
    Counter,
    Scratch,
    code_of,
    first_of,
    hash_of,
    most_of,
    put_levels,
    to_largest,
    top_of,
    v_of,
    v_of_code,
)
from megatrain_nb.codec.quantised.blocks import HALF, SMALLEST_SCALE
from megatrain_nb.jit import inlined

if TYPE_CHECKING:
    from megatrain_nb.codec.quantised.blocks import Planes
    from megatrain_nb.codec.quantised.linear import Linear


def linear_kernels(codec: Linear) -> BlockKernels:
    """Return the kernels of one codec."""
    x, bits = v_of(codec), codec.bits
    steps = f4(2 ** (bits - 1) - 1)
    zero, last = f4(steps + 1), f4(2 * steps + 1)
    # A float from `zero` to `zero` + 1 with 8 random bits behind the point, and a half.
    fraction = 24 - bits
    pattern = u4(int(zero.view(np.uint32)) | 1 << (fraction - 9))
    random_bits = u4(0xFF << (fraction - 8))
    left = u4(fraction - 8)

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
    def begin_encode(largest: np.uint32) -> Any:
        scale = u4(to_bits(f4(to_largest(largest) / steps)) >> u4(16))
        step = to_float(u4(scale << u4(16)))
        if step < SMALLEST_SCALE:
            return u4(0), f4(0)
        return scale, f4(f4(1) / step)

    @inlined
    def place(m: np.float32, inverse: np.float32, random: np.uint32) -> np.uint32:
        part = to_float(u4(u4(random & random_bits) | pattern))
        place = f4(f4(m * inverse) + part)
        place = place if place > f4(1) else f4(1)
        return u4(i4(place if place < last else last))

    @inlined
    def encode(s: Scratch, state: Any, i: int, block: Any, counter: Counter) -> Any:
        noise = hash_of(block, i, counter)
        inverse = state[1]
        s.m_code[i] = place(s.m[i], inverse, u4(noise << left))
        other = u4(u4(noise >> u4(9)) << left)
        s.m_code[i + HALF] = place(s.m[i + HALF], inverse, other)
        return put_levels(s, i, noise, x)

    @inlined
    def end_encode(planes: Planes, b: int, s: Scratch, state: Any, level: Any) -> None:
        top = top_of(level, x)
        planes.scale[b], planes.top[b] = np.uint16(state[0]), u1(top)
        first = first_of(top, x)
        most = most_of(first, x)
        for i in range(HALF):
            m_0, m_1 = s.m_code[i], s.m_code[i + HALF]
            v_0 = code_of(first, s.v_code[i], most)
            v_1 = code_of(first, s.v_code[i + HALF], most)
            if bits == 4:
                planes.m[b, i] = u1(m_0 | u4(m_1 << u4(4)))
                planes.v[b, i] = u1(v_0 | u4(v_1 << u4(4)))
            else:
                planes.m[b, i], planes.m[b, i + HALF] = u1(m_0), u1(m_1)
                planes.v[b, i], planes.v[b, i + HALF] = u1(v_0), u1(v_1)

    return BlockKernels(begin_decode, decode, begin_encode, encode, end_encode)
