"""3 and 2 bits, compiled; see projected.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import float32 as f4
from numpy import int32 as i4
from numpy import uint16 as u2
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.kernels import INFINITY, put, to_bits, to_float
from megatrain_nb.codec.quantised.block_kernels import (
    FACTORS_U4,
    M_TOP,
    OWN,
    BlockKernels,
    Scratch,
    begin_v,
    first_of,
    largest_of,
    level_of,
    magnitude,
    max_of,
    narrow_kernels,
    nibbles,
    pack_nibbles_kernel,
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
from megatrain_nb.codec.quantised.projected import SLACK, UNIT
from megatrain_nb.jit import inlined

if TYPE_CHECKING:
    from megatrain_nb.codec.quantised.blocks import Planes
    from megatrain_nb.codec.quantised.projected import Projected


_ONE = u4(0x3F800000)
TO_SIZE, TOTAL = OWN, OWN + 1
"""1 / the largest magnitude, or 0; the sum of the sizes."""
PER_STEP, SPREAD, BASE = OWN + 2, OWN + 3, OWN + 4
"""Steps in a size, the width of the dither, what is added to both."""
ALONG, SQUARE = OWN + 5, OWN + 6
"""The sums that the projection divides."""


def projected_kernels(codec: Projected) -> BlockKernels:
    """Return the kernels of one codec."""
    x = v_of(codec)
    bits = codec.bits
    unpack, pack = unpack_kernel(bits), pack_nibbles_kernel(bits)
    narrow = narrow_kernels(x, bits)
    top_level, encode_levels, pack_v = narrow.top, narrow.encode, narrow.pack
    doubling = u4(codec.shift - 23)
    levels, levels_f4 = i4(codec.levels), f4(codec.levels)
    unit, half_unit, cut = i4(UNIT), i4(UNIT // 2), i4(-UNIT)
    mean_step = f4(codec.mean_step())
    width, least = f4(codec.width), f4(codec.least())
    count, largest_size = COUNT, u4((COUNT + f4(1)).view(np.uint32))
    zero_size, half = u4(COUNT.view(np.uint32)), f4(COUNT + f4(0.5))
    zero_sizes = u4(BLOCK * int(zero_size) & 0xFFFFFFFF)
    all_levels = u4(0x11111111 * codec.levels)
    sign_only = codec.levels == 1
    last = u4((COUNT + levels_f4).view(np.uint32))

    @inlined
    def begin_decode(planes: Planes, b: np.uintp) -> Any:
        # Where the scale is 0 so are all levels: any other scale does.
        scale = u4(u4(planes.scale[b]) << u4(16))
        step = scale if scale > u4(0) else _ONE
        return step, first_of(u4(planes.top[b]), x)

    @inlined
    def octaves_of(v_code: np.uint32) -> np.uint32:
        """Return the exponent of the root of v's decay within the block."""
        return u4(u4(v_code << doubling) >> u4(1))

    @inlined
    def decode(planes: Planes, b: np.uintp, header: Any, i: int, k: int) -> Any:
        step, first = header
        v_code = unpack(planes.v, b, i, k)
        level = f4(i4(i4(unpack(planes.m, b, i, k)) - levels))
        # Divided by the root, a power of two, in the exponent.
        root = u4(octaves_of(v_code) << u4(23))
        return f4(level * to_float(u4(step - root))), v_of_code(first, v_code, x)

    @inlined
    def level(v: np.float32, noise: np.uint32, odd: bool) -> np.uint32:
        level = level_of(v, noise, x)
        return x.widest if odd and level > x.widest else level

    @inlined
    def even_out(s: Scratch, i: int, codes: np.uint32, k: int) -> np.uint32:
        """Multiply m by the root of v's decay, byte k of the codes; return the magnitude."""
        code = u4(u4(codes >> u4(8 * k)) & u4(0xFF))
        m = f4(s.m[i] * to_float(u4(u4(octaves_of(code) + u4(127)) << u4(23))))
        s.m[i] = m
        return magnitude(m)

    @inlined
    def size_of(m: np.float32) -> np.uint32:
        return u4(0)  # the largest is looked for when m is evened out

    def begin_encode(planes: Planes, b: np.uintp, s: Scratch) -> None:
        """Write the top of v."""
        begin_v(planes, b, s, top_level(s), x)

    def encode(planes: Planes, b: np.uintp, s: Scratch) -> None:
        """Write the codes of v."""
        encode_levels(s)
        largest = u4(0)
        for i in range(LANES):
            low, high = s.level[i], s.level[LANES + i]
            size_0, size_1 = even_out(s, i, low, 0), even_out(s, 16 + i, low, 1)
            size_2, size_3 = even_out(s, 32 + i, low, 2), even_out(s, 48 + i, low, 3)
            size_4, size_5 = even_out(s, 64 + i, high, 0), even_out(s, 80 + i, high, 1)
            size_6, size_7 = even_out(s, 96 + i, high, 2), even_out(s, 112 + i, high, 3)
            sizes = size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7
            pack_v(planes.v, b, i, s)
            largest = max_of(largest, largest_of(sizes))
        put(s.number, M_TOP, largest)

    @inlined
    def without_sign(s: Scratch) -> None:
        """Take the sign of what is NaN: that is not below zero."""
        for i in range(BLOCK):
            size = magnitude(s.m[i])
            s.m[i] = to_float(size) if size > INFINITY else s.m[i]

    def begin_measure(planes: Planes, b: np.uintp, s: Scratch) -> None:
        if s.number[M_TOP] > INFINITY:
            without_sign(s)
        top = to_largest(s.number[M_TOP])
        to_size = f4(f4(1) / top) if top >= SMALLEST_SCALE else f4(0)
        put(s.number, TO_SIZE, to_bits(to_size))

    def measure(planes: Planes, b: np.uintp, s: Scratch) -> None:
        """Put the sizes and their sum."""
        to_size, total = to_float(s.number[TO_SIZE]), u4(0)
        for i in range(BLOCK):
            size = to_bits(f4(f4(to_float(magnitude(s.m[i])) * to_size) + count))
            size = size if size < largest_size else largest_size
            put(s.size, i, to_float(size))
            total = u4(total + size)
        put(s.number, TOTAL, u4(total - zero_sizes))

    @inlined
    def is_exact(s: Scratch) -> bool:
        """Return whether all sizes are multiples of a step: mostly one look is enough."""
        for i in range(BLOCK):
            near = i4(i4(u4(to_bits(s.size[i]) - zero_size)) * levels)
            off = i4(near - i4(i4(near + half_unit) & cut))
            if off > levels or off < i4(-levels):
                return False
        return True

    @inlined
    def m_code(
        s: Scratch, i: int, noise: np.uint32, per_step: Any, spread: Any, least: Any
    ) -> tuple[np.uint32, np.int32, np.int32]:
        """Return level and sign of m, its level times the size, and the level's square."""
        part = f4(f4(to_float(u4(u4(noise & M_BITS) | M_PATTERN)) * spread) + least)
        place = to_bits(f4(f4(s.size[i] * per_step) + part))
        place = place if place < last else last
        far = i4(u4(u4(place >> u4(15)) & u4(3)))
        along = i4(far * i4(u4(to_bits(s.size[i]) - zero_size)))
        code = u4(u4(u4(far) << u4(1)) | u4(to_bits(s.m[i]) >> u4(31)))
        return code, along, far if sign_only else i4(far * far)

    @inlined
    def pack_m(plane: Any, b: np.uintp, i: int, codes: Any) -> None:
        """Write the codes of a lane's levels and signs: `levels` more, or less, all at once."""
        word = nibbles(codes)
        negative = u4(u4(word & u4(0x11111111)) * u4(levels))
        far = u4(u4(word >> u4(1)) & all_levels)
        pack(plane, b, i, u4(u4(far ^ negative) + u4(all_levels - negative)))

    @inlined
    def sum_of(values: Any) -> Any:
        a, b, c, d, e, f, g, h = values
        left, right = i4(i4(a + b) + i4(c + d)), i4(i4(e + f) + i4(g + h))
        return i4(left + right)

    def begin_rest(planes: Planes, b: np.uintp, s: Scratch) -> None:
        mean = f4(f4(i4(s.number[TOTAL])) * mean_step)
        per = f4(f4(1) / (mean if mean > mean_step else mean_step))
        per, spread, base = max(per, levels_f4), width, least
        if is_exact(s):
            per, spread, base = levels_f4, f4(0), half
        put(s.number, PER_STEP, to_bits(per))
        put(s.number, SPREAD, to_bits(spread))
        put(s.number, BASE, to_bits(f4(base - f4(count * per))))

    def encode_rest(planes: Planes, b: np.uintp, s: Scratch) -> None:
        """Write the codes of m."""
        per, spread = to_float(s.number[PER_STEP]), to_float(s.number[SPREAD])
        base, along, square = to_float(s.number[BASE]), i4(0), i4(0)
        for i in range(LANES):
            at = s.hash[i]
            c_0, a_0, q_0 = m_code(s, i, u4(at * FACTORS_U4[0]), per, spread, base)
            c_1, a_1, q_1 = m_code(s, 16 + i, u4(at * FACTORS_U4[1]), per, spread, base)
            c_2, a_2, q_2 = m_code(s, 32 + i, u4(at * FACTORS_U4[2]), per, spread, base)
            c_3, a_3, q_3 = m_code(s, 48 + i, u4(at * FACTORS_U4[3]), per, spread, base)
            c_4, a_4, q_4 = m_code(s, 64 + i, u4(at * FACTORS_U4[4]), per, spread, base)
            c_5, a_5, q_5 = m_code(s, 80 + i, u4(at * FACTORS_U4[5]), per, spread, base)
            c_6, a_6, q_6 = m_code(s, 96 + i, u4(at * FACTORS_U4[6]), per, spread, base)
            c_7, a_7, q_7 = m_code(
                s, 112 + i, u4(at * FACTORS_U4[7]), per, spread, base
            )
            pack_m(planes.m, b, i, (c_0, c_1, c_2, c_3, c_4, c_5, c_6, c_7))
            along = i4(along + sum_of((a_0, a_1, a_2, a_3, a_4, a_5, a_6, a_7)))
            square = i4(square + sum_of((q_0, q_1, q_2, q_3, q_4, q_5, q_6, q_7)))
        put(s.number, ALONG, u4(along))
        put(s.number, SQUARE, u4(square))

    @inlined  # spliced, numba would count references to the planes at each branch
    def put_scale(planes: Planes, b: np.uintp, scale: np.float32) -> None:
        if scale < SMALLEST_SCALE:
            for i in range(LANES):
                pack(planes.m, b, i, all_levels)
            planes.scale[b] = u2(0)
        else:
            planes.scale[b] = u2(u4(to_bits(scale) >> u4(16)))

    def finish(planes: Planes, b: np.uintp, s: Scratch) -> None:
        """Write the scale of m."""
        along, square = i4(s.number[ALONG]), i4(s.number[SQUARE])
        square = square if square > i4(1) else i4(1)
        share = f4(f4(along) / f4(i4(square * unit)))
        scale = f4(f4(to_largest(s.number[M_TOP]) * share) * SLACK)
        put_scale(planes, b, scale)

    return BlockKernels(
        *(begin_decode, decode, level, narrow.put, narrow.cut, size_of),
        *(begin_encode, encode),
        *(begin_measure, measure, begin_rest, encode_rest, finish),
    )
