"""Decode and encode one block of a quantised codec, compiled; importing imports numba.

The same bytes as the numpy codecs beside this file, which say what is done and why.
Each function is a few loops over the 128 elements of a block, none with a branch, so
that LLVM makes vectors of them; see [Note: 32 bits] for the casts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy import float32 as f4
from numpy import int32 as i4
from numpy import uint8 as u1
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.kernels import to_bits, to_float
from megatrain_nb.codec.quantised.blocks import (
    HALF,
    LARGEST,
    LARGEST_V,
    MULTIPLY_1,
    MULTIPLY_2,
    SMALLEST_SCALE,
    SPREAD,
    Planes2,
    Planes3,
    Planes4,
    Planes8,
    key_words,
)
from megatrain_nb.codec.quantised.projected import SLACK, UNIT
from megatrain_nb.codec.quantised.eight import CODEC as EIGHT
from megatrain_nb.codec.quantised.four import CODEC as FOUR
from megatrain_nb.codec.quantised.three import CODEC as THREE
from megatrain_nb.codec.quantised.two import CODEC as TWO
from megatrain_nb.jit import inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain_nb.codec.base import Key
    from megatrain_nb.codec.quantised.blocks import BlockCodec, Planes
    from megatrain_nb.codec.quantised.linear import Linear
    from megatrain_nb.codec.quantised.projected import Projected

_LINE = 64
_SIGNLESS = u4(0x7FFFFFFF)
_SPREAD_SCALE, _SPREAD_OFFSET = SPREAD


class Scratch(NamedTuple):
    """Memory for one block: its moments, and what it takes to encode them."""

    m: NDArray[np.float32]
    v: NDArray[np.float32]
    m_code: NDArray[np.uint32]
    v_code: NDArray[np.uint32]
    noise: NDArray[np.uint32]
    size: NDArray[np.int32]


class Counter(NamedTuple):
    """A `Key` as the kernels count."""

    block: np.uint32
    word_1: np.uint32
    word_2: np.uint32


def make_scratch() -> Scratch:
    """Return memory for one block; compiled, it is on the stack.

    So LLVM knows that it overlaps with no array, and need not ask in every loop.
    """
    floats, codes = np.zeros((2, BLOCK), np.float32), np.zeros((3, BLOCK), np.uint32)
    return Scratch(*floats, *codes, np.zeros(BLOCK, np.int32))


@intrinsic
def _stack(_typing: Any, dtype: Any) -> Any:
    """Return a pointer to `BLOCK` values on the stack."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        value_type = context.get_value_type(dtype.dtype)
        memory = cgutils.alloca_once(builder, value_type, size=BLOCK)
        memory.align = _LINE
        return memory

    return types.CPointer(dtype.dtype)(dtype), generate


@overload(make_scratch, strict=False)
def _compiled_scratch() -> Any:
    return lambda: Scratch(
        carray(_stack(f4), BLOCK),
        carray(_stack(f4), BLOCK),
        carray(_stack(u4), BLOCK),
        carray(_stack(u4), BLOCK),
        carray(_stack(u4), BLOCK),
        carray(_stack(i4), BLOCK),
    )


def make_counter(key: Key) -> Counter:
    """Return where the dither begins."""
    return Counter(u4(key.first // BLOCK & 0xFFFFFFFF), *key_words(key))


# ------------------------------------------------------------------ shared


@inlined
def _hash(block: np.uint32, i: int, counter: Counter) -> np.uint32:
    x = u4(u4(block * u4(HALF)) + u4(i))
    x = u4(x ^ counter.word_1)
    x = u4(u4(x ^ u4(x >> u4(16))) * MULTIPLY_1)
    x = u4(u4(u4(x ^ u4(x >> u4(15))) + counter.word_2) * MULTIPLY_2)
    return u4(x ^ u4(x >> u4(16)))


@inlined
def _magnitude(value: np.float32) -> np.uint32:
    return u4(to_bits(value) & _SIGNLESS)


@inlined
def _largest(m: NDArray[np.float32]) -> np.float32:
    top = u4(0)
    for i in range(BLOCK):
        bits = _magnitude(m[i])
        top = bits if bits > top else top
    return to_float(top if top < LARGEST else LARGEST)


class _V(NamedTuple):
    """How a codec stores v: numbers that its kernels are compiled with."""

    shift: np.uint32
    left: np.uint32
    half: np.uint32
    least: np.uint32
    most: np.uint32
    fine: np.uint32
    below: np.uint32


def _v_of(codec: BlockCodec) -> _V:
    fine = max(0, 23 - codec.shift)
    return _V(
        shift=u4(codec.shift),
        left=u4(codec.shift - 16),
        half=u4(1 << (codec.shift - 17)),
        least=u4(max(1, 1 << 23 >> codec.shift)),
        most=u4(2**codec.bits - 1),
        fine=u4(fine),
        below=u4((1 << fine) - 1),
    )


@inlined
def _level(v: np.float32, noise: np.uint32, x: _V) -> np.uint32:
    bits = _magnitude(v)
    bits = bits if bits < LARGEST_V else LARGEST_V
    if x.shift == 24:
        at_least = to_bits(f4(f4(f4(i4(noise)) * _SPREAD_SCALE) + _SPREAD_OFFSET))
        bits = u4(bits + u4(u4(0x40800000) - at_least))
    else:
        bits = u4(bits + u4(u4(noise << x.left) | x.half))
    level = u4(bits >> x.shift)
    return level if level > x.least else x.least


@inlined
def _first(top: np.uint32, x: _V) -> np.uint32:
    return u4(u4(top << x.fine) | x.below)


@inlined
def _code(first: np.uint32, level: np.uint32, x: _V) -> np.uint32:
    code = u4(first - level)
    return code if code < x.most else x.most


# ------------------------------------------------------------ 8 and 4 bits


def _linear_kernels(codec: Linear) -> tuple[Any, Any]:
    """Return kernels that decode and encode one block."""
    x, bits = _v_of(codec), codec.bits
    steps = f4(2 ** (bits - 1) - 1)
    zero, last = f4(steps + 1), f4(2 * steps + 1)
    middle = f4(zero + 2.0**-9)

    @inlined
    def decode(planes: Planes, b: int, s: Scratch) -> None:
        step = to_float(u4(u4(planes.scale[b]) << u4(16)))
        first = _first(u4(planes.top[b]), x)
        for i in range(HALF):
            if bits == 4:
                m_0, v_0 = u4(planes.m[b, i]), u4(planes.v[b, i])
                m_1, v_1 = u4(m_0 >> u4(4)), u4(v_0 >> u4(4))
                m_0, v_0 = u4(m_0 & u4(15)), u4(v_0 & u4(15))
            else:
                m_0, v_0 = u4(planes.m[b, i]), u4(planes.v[b, i])
                m_1, v_1 = u4(planes.m[b, i + HALF]), u4(planes.v[b, i + HALF])
            s.m[i] = f4(f4(f4(i4(m_0)) - zero) * step)
            s.m[i + HALF] = f4(f4(f4(i4(m_1)) - zero) * step)
            s.v[i] = to_float(u4(u4(first - v_0) << x.shift))
            s.v[i + HALF] = to_float(u4(u4(first - v_1) << x.shift))

    @inlined
    def place(m: np.float32, inverse: np.float32, noise: np.uint32) -> np.uint32:
        part = f4(f4(i4(u4(noise & u4(0xFF)))) * f4(2.0**-8))
        place = f4(f4(m * inverse) + f4(part + middle))
        place = place if place > f4(1) else f4(1)
        return u4(i4(place if place < last else last))

    @inlined
    def encode(planes: Planes, b: int, s: Scratch, counter: Counter) -> None:
        scale = u4(to_bits(f4(_largest(s.m) / steps)) >> u4(16))
        step = to_float(u4(scale << u4(16)))
        if step < SMALLEST_SCALE:
            scale, inverse = u4(0), f4(0)
        else:
            inverse = f4(f4(1) / step)
        block, top = u4(counter.block + u4(b)), u4(0)
        for i in range(HALF):
            noise = _hash(block, i, counter)
            upper = u4(noise >> u4(16))
            noise = u4(noise & u4(0xFFFF))
            s.m_code[i] = place(s.m[i], inverse, noise)
            s.m_code[i + HALF] = place(s.m[i + HALF], inverse, upper)
            level_0 = _level(s.v[i], noise, x)
            level_1 = _level(s.v[i + HALF], upper, x)
            s.v_code[i], s.v_code[i + HALF] = level_0, level_1
            level = level_0 if level_0 > level_1 else level_1
            top = level if level > top else top
        top = u4(top >> x.fine)
        first = _first(top, x)
        planes.scale[b], planes.top[b] = np.uint16(scale), u1(top)
        for i in range(HALF):
            m_0, m_1 = s.m_code[i], s.m_code[i + HALF]
            v_0 = _code(first, s.v_code[i], x)
            v_1 = _code(first, s.v_code[i + HALF], x)
            if bits == 4:
                planes.m[b, i] = u1(m_0 | u4(m_1 << u4(4)))
                planes.v[b, i] = u1(v_0 | u4(v_1 << u4(4)))
            else:
                planes.m[b, i], planes.m[b, i + HALF] = u1(m_0), u1(m_1)
                planes.v[b, i], planes.v[b, i + HALF] = u1(v_0), u1(v_1)

    return decode, encode


# ------------------------------------------------------------ 3 and 2 bits


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
    for k in range(8):
        for i in range(16):
            bit = u4(u4(u4(row[b, 32 + i]) >> u4(k)) & u4(1))
            out[16 * k + i] = u4(out[16 * k + i] | u4(bit << u4(2)))


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


def _projected_kernels(codec: Projected) -> tuple[Any, Any]:
    """Return kernels that decode and encode one block."""
    x, three_bits = _v_of(codec), codec.bits == 3
    doubling = u4(codec.shift - 23)
    levels, levels_f4 = i4(codec.levels), f4(codec.levels)
    unit, unit_i4 = f4(UNIT), i4(UNIT)
    half_unit, cut = i4(UNIT // 2), i4(-UNIT)
    step = f4(codec.step / BLOCK)
    least_per_step = f4(codec.levels / UNIT)
    slope = f4(codec.width / 256)
    offset = f4((1 - codec.width) / 2 + codec.width / 512)

    @inlined
    def decode(planes: Planes, b: int, s: Scratch) -> None:
        _unpack_2(planes.m, b, s.m_code)
        _unpack_2(planes.v, b, s.v_code)
        if three_bits:
            _unpack_high(planes.m, b, s.m_code)
            _unpack_high(planes.v, b, s.v_code)
        step = to_float(u4(u4(planes.scale[b]) << u4(16)))
        first = _first(u4(planes.top[b]), x)
        for i in range(BLOCK):
            code = s.v_code[i]
            s.v[i] = to_float(u4(u4(first - code) << x.shift))
            level = f4(i4(i4(s.m_code[i]) - levels))
            octaves = u4(u4(code << doubling) >> u4(1))
            inverse_root = to_float(u4(u4(u4(127) - octaves) << u4(23)))
            s.m[i] = f4(f4(level * step) * inverse_root)

    @inlined
    def encode_v(s: Scratch, block: np.uint32, counter: Counter) -> np.uint32:
        """Put noise, then the codes of v; return the top."""
        top = u4(0)
        for i in range(HALF):
            noise = _hash(block, i, counter)
            s.noise[i], s.noise[i + HALF] = u4(noise & u4(0xFFFF)), u4(noise >> u4(16))
        for i in range(BLOCK):
            level = _level(s.v[i], s.noise[i], x)
            s.v_code[i] = level
            top = level if level > top else top
        return u4(top >> x.fine)

    @inlined
    def even_out(s: Scratch, first: np.uint32) -> np.float32:
        """Put v's codes, m times the root of v's decay; return the largest."""
        top = u4(0)
        for i in range(BLOCK):
            code = _code(first, s.v_code[i], x)
            s.v_code[i] = code
            octaves = u4(u4(code << doubling) >> u4(1))
            m = f4(s.m[i] * to_float(u4(u4(octaves + u4(127)) << u4(23))))
            s.m[i] = m
            bits = _magnitude(m)
            top = bits if bits > top else top
        return to_float(top if top < LARGEST else LARGEST)

    @inlined
    def encode_m(s: Scratch, top: np.float32) -> np.uint16:
        """Put the codes of m; return the scale."""
        to_size = f4(unit / top) if top >= SMALLEST_SCALE else f4(0)
        total, far = i4(0), i4(0)
        for i in range(BLOCK):
            place = f4(f4(to_float(_magnitude(s.m[i])) * to_size) + f4(0.5))
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
            part = f4(f4(f4(i4(u4(s.noise[i] & u4(0xFF)))) * times) + least)
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
    def encode(planes: Planes, b: int, s: Scratch, counter: Counter) -> None:
        top = encode_v(s, u4(counter.block + u4(b)), counter)
        planes.top[b] = u1(top)
        largest = even_out(s, _first(top, x))
        planes.scale[b] = encode_m(s, largest)
        _pack_2(s.m_code, planes.m, b)
        _pack_2(s.v_code, planes.v, b)
        if three_bits:
            _pack_high(s.m_code, planes.m, b)
            _pack_high(s.v_code, planes.v, b)

    return decode, encode


# ---------------------------------------------------------------- dispatch

_KERNELS = {
    Planes8: _linear_kernels(EIGHT),
    Planes4: _linear_kernels(FOUR),
    Planes3: _projected_kernels(THREE),
    Planes2: _projected_kernels(TWO),
}


def decode_block(planes: Planes, b: int, s: Scratch) -> None:
    """Put the moments of block b in the scratch."""
    _KERNELS[type(planes)][0](planes, b, s)


def encode_block(planes: Planes, b: int, s: Scratch, counter: Counter) -> None:
    """Store the moments that are in the scratch, as block b.

    Of the scratch nothing remains. `counter` is that of block 0 of `planes`.
    """
    _KERNELS[type(planes)][1](planes, b, s, counter)


@overload(decode_block, strict=False)
def _compiled_decode(planes: Any, b: Any, s: Any) -> Any:  # noqa: ARG001
    decode, _ = _KERNELS[planes.instance_class]
    return lambda planes, b, s: decode(planes, b, s)


@overload(encode_block, strict=False)
def _compiled_encode(planes: Any, b: Any, s: Any, counter: Any) -> Any:  # noqa: ARG001
    _, encode = _KERNELS[planes.instance_class]
    return lambda planes, b, s, counter: encode(planes, b, s, counter)
