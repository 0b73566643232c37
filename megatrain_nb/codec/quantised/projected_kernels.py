"""3 and 2 bits, compiled; see projected.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import float32 as f4
from numpy import int32 as i4
from numpy import uint8 as u1
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.kernels import to_bits, to_float
from megatrain_nb.codec.quantised.block_kernels import (
    BlockKernels,
    Scratch,
    code_of,
    first_of,
    level_of,
    magnitude,
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
from megatrain_nb.codec.quantised.projected import SLACK, UNIT
from megatrain_nb.jit import inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain_nb.codec.quantised.blocks import Planes
    from megatrain_nb.codec.quantised.projected import Projected


_ONE = u4(0x3F800000)


@inlined
def _unpack_2(row: NDArray[np.uint8], b: int, out: NDArray[np.uint8]) -> None:
    for i in range(32):
        byte = u4(row[b, i])
        out[i] = u1(byte & u4(3))
        out[i + 32] = u1(u4(byte >> u4(2)) & u4(3))
        out[i + 64] = u1(u4(byte >> u4(4)) & u4(3))
        out[i + 96] = u1(byte >> u4(6))


@inlined
def _unpack_high(row: NDArray[np.uint8], b: int, out: NDArray[np.uint8]) -> None:
    """Add the third bits."""
    for i in range(16):
        byte = u4(row[b, 32 + i])
        # By hand: LLVM makes no vectors of a loop over the eight.
        out[i] = u1(out[i] | u4(u4(byte << u4(2)) & u4(4)))
        out[i + 16] = u1(out[i + 16] | u4(u4(byte << u4(1)) & u4(4)))
        out[i + 32] = u1(out[i + 32] | u4(byte & u4(4)))
        out[i + 48] = u1(out[i + 48] | u4(u4(byte >> u4(1)) & u4(4)))
        out[i + 64] = u1(out[i + 64] | u4(u4(byte >> u4(2)) & u4(4)))
        out[i + 80] = u1(out[i + 80] | u4(u4(byte >> u4(3)) & u4(4)))
        out[i + 96] = u1(out[i + 96] | u4(u4(byte >> u4(4)) & u4(4)))
        out[i + 112] = u1(out[i + 112] | u4(u4(byte >> u4(5)) & u4(4)))


@inlined
def _pack_2(codes: NDArray[np.uint32], row: NDArray[np.uint8], b: int) -> None:
    for i in range(32):
        low = u4(u4(codes[i] & u4(3)) | u4(u4(codes[i + 32] & u4(3)) << u4(2)))
        high = u4(u4(codes[i + 64] & u4(3)) | u4(u4(codes[i + 96] & u4(3)) << u4(2)))
        row[b, i] = u1(low | u4(high << u4(4)))


@inlined
def _pack_high(codes: NDArray[np.uint32], row: NDArray[np.uint8], b: int) -> None:
    for i in range(16):
        byte = u4(0)
        for k in range(8):
            byte = u4(byte | u4(u4(codes[16 * k + i] >> u4(2)) << u4(k)))
        row[b, 32 + i] = u1(byte)


def projected_kernels(codec: Projected) -> BlockKernels:
    """Return the kernels of one codec."""
    x, three_bits = v_of(codec), codec.bits == 3
    doubling = u4(codec.shift - 23)
    levels, levels_f4 = i4(codec.levels), f4(codec.levels)
    unit, half_unit, cut = i4(UNIT), i4(UNIT // 2), i4(-UNIT)
    mean_step = f4(codec.mean_step())
    width, least = f4(codec.width), f4(codec.least())
    count, largest_size = COUNT, u4((COUNT + f4(1)).view(np.uint32))
    zero_size, half = u4(COUNT.view(np.uint32)), f4(COUNT + f4(0.5))
    last = u4((COUNT + levels_f4).view(np.uint32))

    @inlined
    def begin_decode(planes: Planes, b: int, s: Scratch) -> Any:
        _unpack_2(planes.m, b, s.m_byte)
        _unpack_2(planes.v, b, s.v_byte)
        if three_bits:
            _unpack_high(planes.m, b, s.m_byte)
            _unpack_high(planes.v, b, s.v_byte)
        # Where the scale is 0 so are all levels: any other scale does.
        scale = u4(u4(planes.scale[b]) << u4(16))
        step = scale if scale > u4(0) else _ONE
        return step, first_of(u4(planes.top[b]), x)

    @inlined
    def restore_m(code: np.uint32, v_code: np.uint32, step: np.uint32) -> np.float32:
        level = f4(i4(i4(code) - levels))
        octaves = u4(u4(v_code << doubling) >> u4(1))
        # Divided by the root, a power of two, in the exponent.
        return f4(level * to_float(u4(step - u4(octaves << u4(23)))))

    @inlined
    def decode(planes: Planes, b: int, s: Scratch, header: Any, i: int) -> Any:
        step, first = header
        v_0, v_1 = u4(s.v_byte[i]), u4(s.v_byte[i + HALF])
        return (
            restore_m(u4(s.m_byte[i]), v_0, step),
            restore_m(u4(s.m_byte[i + HALF]), v_1, step),
            v_of_code(first, v_0, x),
            v_of_code(first, v_1, x),
        )

    @inlined
    def level(v: np.float32, noise: np.uint32) -> np.uint32:
        return level_of(v, noise, x)

    @inlined
    def begin_encode(planes: Planes, b: int, s: Scratch, largest: np.uint32) -> Any:
        top, first, most = range_of(s, x)
        planes.top[b] = u1(top)
        return first, most

    @inlined
    def even_out(s: Scratch, first: np.uint32, most: np.uint32, i: int) -> np.uint32:
        """Put the code of v, and m times the root of v's decay; return its magnitude."""
        code = code_of(first, s.v_code[i], most)
        s.v_code[i] = code
        octaves = u4(u4(code << doubling) >> u4(1))
        m = f4(s.m[i] * to_float(u4(u4(octaves + u4(127)) << u4(23))))
        s.m[i] = m
        return magnitude(m)

    @inlined
    def encode(planes: Planes, b: int, s: Scratch, state: Any, i: int) -> np.uint32:
        first, most = state
        bits_0 = even_out(s, first, most, i)
        bits_1 = even_out(s, first, most, i + HALF)
        return bits_0 if bits_0 > bits_1 else bits_1

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
    def encode_m(s: Scratch, top: np.float32) -> np.uint16:
        """Put the codes of m; return the scale."""
        to_size = f4(f4(1) / top) if top >= SMALLEST_SCALE else f4(0)
        total = i4(0)
        for i in range(BLOCK):
            size = to_bits(f4(f4(to_float(magnitude(s.m[i])) * to_size) + count))
            size = size if size < largest_size else largest_size
            s.size[i] = to_float(size)
            total = i4(total + i4(u4(size - zero_size)))
        mean = f4(f4(total) * mean_step)
        per_step = f4(f4(1) / (mean if mean > mean_step else mean_step))
        per_step, spread, base = max(per_step, levels_f4), width, least
        if is_exact(s):
            per_step, spread, base = levels_f4, f4(0), half
        base = f4(base - f4(count * per_step))
        along, square = i4(0), i4(0)
        for i in range(BLOCK):
            part = f4(
                f4(to_float(u4(u4(s.noise[i] & M_BITS) | M_PATTERN)) * spread) + base
            )
            place = to_bits(f4(f4(s.size[i] * per_step) + part))
            place = place if place < last else last
            code = i4(u4(u4(place >> u4(15)) & u4(3)))
            along = i4(along + i4(code * i4(u4(to_bits(s.size[i]) - zero_size))))
            square = i4(square + i4(code * code))
            signed = i4(levels - code) if s.m[i] < 0 else i4(levels + code)
            s.m_code[i] = u4(signed)
        square = square if square > i4(1) else i4(1)
        share = f4(f4(along) / f4(i4(square * unit)))
        scale = f4(f4(top * share) * SLACK)
        if scale < SMALLEST_SCALE:
            for i in range(BLOCK):
                s.m_code[i] = u4(levels)
            return np.uint16(0)
        return np.uint16(to_bits(scale) >> u4(16))

    @inlined
    def end_encode(planes: Planes, b: int, s: Scratch, largest: np.uint32) -> None:
        planes.scale[b] = encode_m(s, to_largest(largest))
        _pack_2(s.m_code, planes.m, b)
        _pack_2(s.v_code, planes.v, b)
        if three_bits:
            _pack_high(s.m_code, planes.m, b)
            _pack_high(s.v_code, planes.v, b)

    return BlockKernels(begin_decode, decode, level, begin_encode, encode, end_encode)
