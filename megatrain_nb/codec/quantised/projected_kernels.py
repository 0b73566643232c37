"""3 and 2 bits, compiled; see projected.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import float32 as f4
from numpy import int32 as i4
from numpy import uint8 as u1
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.kernels import load, to_bits, to_float
from megatrain_nb.codec.quantised.block_kernels import (
    BlockKernels,
    Counter,
    Scratch,
    code_of,
    first_of,
    hash_of,
    magnitude,
    most_of,
    put_levels,
    to_largest,
    top_of,
    v_of,
    v_of_code,
)
from megatrain_nb.codec.quantised.blocks import HALF, SMALLEST_SCALE
from megatrain_nb.codec.quantised.projected import SLACK, UNIT
from megatrain_nb.jit import inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain_nb.codec.quantised.blocks import Planes
    from megatrain_nb.codec.quantised.projected import Projected


@inlined
def _unpack_2(row: NDArray[np.uint8], b: int, out: NDArray[np.uint32]) -> None:
    for i in range(32):
        byte = u4(row[b, i])
        out[i] = u4(byte & u4(3))
        out[i + 32] = u4(u4(byte >> u4(2)) & u4(3))
        out[i + 64] = u4(u4(byte >> u4(4)) & u4(3))
        out[i + 96] = u4(byte >> u4(6))


@inlined
def _unpack_high(row: NDArray[np.uint8], b: int, out: NDArray[np.uint32]) -> None:
    """Add the third bits."""
    for i in range(16):
        byte = u4(row[b, 32 + i])
        # By hand: LLVM makes no vectors of a loop over the eight.
        out[i] = u4(out[i] | u4(u4(byte << u4(2)) & u4(4)))
        out[i + 16] = u4(out[i + 16] | u4(u4(byte << u4(1)) & u4(4)))
        out[i + 32] = u4(out[i + 32] | u4(byte & u4(4)))
        out[i + 48] = u4(out[i + 48] | u4(u4(byte >> u4(1)) & u4(4)))
        out[i + 64] = u4(out[i + 64] | u4(u4(byte >> u4(2)) & u4(4)))
        out[i + 80] = u4(out[i + 80] | u4(u4(byte >> u4(3)) & u4(4)))
        out[i + 96] = u4(out[i + 96] | u4(u4(byte >> u4(4)) & u4(4)))
        out[i + 112] = u4(out[i + 112] | u4(u4(byte >> u4(5)) & u4(4)))


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
    unit, unit_i4 = f4(UNIT), i4(UNIT)
    half_unit, cut = i4(UNIT // 2), i4(-UNIT)
    step = f4(codec.step / BLOCK)
    least_per_step = f4(codec.levels / UNIT)
    slope = f4(codec.width / 256)
    offset = f4((1 - codec.width) / 2 + codec.width / 512)

    @inlined
    def begin_decode(planes: Planes, b: int, s: Scratch) -> Any:
        _unpack_2(planes.m, b, s.m_code)
        _unpack_2(planes.v, b, s.v_code)
        if three_bits:
            _unpack_high(planes.m, b, s.m_code)
            _unpack_high(planes.v, b, s.v_code)
        return load(planes.scale, b), first_of(u4(planes.top[b]), x)

    @inlined
    def restore_m(code: np.uint32, v_code: np.uint32, step: np.float32) -> np.float32:
        level = f4(i4(i4(code) - levels))
        octaves = u4(u4(v_code << doubling) >> u4(1))
        inverse_root = to_float(u4(u4(u4(127) - octaves) << u4(23)))
        return f4(f4(level * step) * inverse_root)

    @inlined
    def decode(planes: Planes, b: int, s: Scratch, header: Any, i: int) -> Any:
        step, first = header
        v_0, v_1 = s.v_code[i], s.v_code[i + HALF]
        return (
            restore_m(s.m_code[i], v_0, step),
            restore_m(s.m_code[i + HALF], v_1, step),
            v_of_code(first, v_0, x),
            v_of_code(first, v_1, x),
        )

    @inlined
    def begin_encode(largest: np.uint32) -> Any:
        return u4(0), f4(0)

    @inlined
    def encode(s: Scratch, state: Any, i: int, block: Any, counter: Counter) -> Any:
        noise = hash_of(block, i, counter)
        s.noise[i] = u4(noise & u4(0xFF))
        s.noise[i + HALF] = u4(u4(noise >> u4(9)) & u4(0xFF))
        return put_levels(s, i, noise, x)

    @inlined
    def even_out(s: Scratch, first: np.uint32) -> np.float32:
        """Put v's codes, m times the root of v's decay; return the largest."""
        top, most = u4(0), most_of(first, x)
        for i in range(BLOCK):
            code = code_of(first, s.v_code[i], most)
            s.v_code[i] = code
            octaves = u4(u4(code << doubling) >> u4(1))
            m = f4(s.m[i] * to_float(u4(u4(octaves + u4(127)) << u4(23))))
            s.m[i] = m
            bits = magnitude(m)
            top = bits if bits > top else top
        return to_largest(top)

    @inlined
    def encode_m(s: Scratch, top: np.float32) -> np.uint16:
        """Put the codes of m; return the scale."""
        to_size = f4(unit / top) if top >= SMALLEST_SCALE else f4(0)
        total, far = i4(0), i4(0)
        for i in range(BLOCK):
            place = f4(f4(to_float(magnitude(s.m[i])) * to_size) + f4(0.5))
            size = i4(place if place < unit else unit)
            s.size[i] = size
            total = i4(total + size)
            near = i4(size * levels)
            off = i4(near - i4(i4(near + half_unit) & cut))
            off = off if off > i4(0) else i4(-off)
            far = off if off > far else far
        per_step, times, least = least_per_step, f4(0), f4(0.5)
        if far > levels:
            mean = f4(f4(total) * step)
            inverse = f4(f4(1) / (mean if mean > f4(1) else f4(1)))
            per_step = inverse if inverse > per_step else per_step
            times, least = slope, offset
        along, square = i4(0), i4(0)
        for i in range(BLOCK):
            part = f4(f4(f4(i4(s.noise[i])) * times) + least)
            place = f4(f4(f4(s.size[i]) * per_step) + part)
            code = i4(place if place < levels_f4 else levels_f4)
            along = i4(along + i4(code * s.size[i]))
            square = i4(square + i4(code * code))
            sign = i4(i4(to_bits(s.m[i])) >> i4(31))
            s.m_code[i] = u4(i4(i4(i4(code ^ sign) - sign) + levels))
        square = square if square > i4(1) else i4(1)
        share = f4(f4(along) / f4(i4(square * unit_i4)))
        scale = f4(f4(top * share) * SLACK)
        if scale < SMALLEST_SCALE:
            for i in range(BLOCK):
                s.m_code[i] = u4(levels)
            return np.uint16(0)
        return np.uint16(to_bits(scale) >> u4(16))

    @inlined
    def end_encode(planes: Planes, b: int, s: Scratch, state: Any, level: Any) -> None:
        top = top_of(level, x)
        planes.top[b] = u1(top)
        largest = even_out(s, first_of(top, x))
        planes.scale[b] = encode_m(s, largest)
        _pack_2(s.m_code, planes.m, b)
        _pack_2(s.v_code, planes.v, b)
        if three_bits:
            _pack_high(s.m_code, planes.m, b)
            _pack_high(s.v_code, planes.v, b)

    return BlockKernels(begin_decode, decode, begin_encode, encode, end_encode)
