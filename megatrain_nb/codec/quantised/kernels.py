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
    param: NDArray[np.float32]
    grad: NDArray[np.float32]
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
    floats, codes = np.zeros((4, BLOCK), np.float32), np.zeros((3, BLOCK), np.uint32)
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
    x = u4(u4(x ^ counter.word_1) * MULTIPLY_1)
    x = u4(u4(u4(x ^ u4(x >> u4(15))) + counter.word_2) * MULTIPLY_2)
    return u4(x ^ u4(x >> u4(16)))


@inlined
def magnitude(value: np.float32) -> np.uint32:
    """Return the pattern without the sign: it sorts as the magnitude does."""
    return u4(to_bits(value) & _SIGNLESS)


@inlined
def _to_largest(bits: np.uint32) -> np.float32:
    return to_float(bits if bits < LARGEST else LARGEST)


class _V(NamedTuple):
    """How a codec stores v: numbers that its kernels are compiled with."""

    shift: np.uint32
    mask: np.uint32
    down: np.uint32
    least: np.uint32
    most: np.uint32
    fine: np.uint32
    below: np.uint32


def _v_of(codec: BlockCodec) -> _V:
    fine = max(0, 23 - codec.shift)
    return _V(
        shift=u4(codec.shift),
        mask=u4((1 << codec.shift) - 1),
        down=u4(32 - codec.shift),
        least=u4(max(1, 1 << 23 >> codec.shift)),
        most=u4(2**codec.bits - 1),
        fine=u4(fine),
        below=u4((1 << fine) - 1),
    )


@inlined
def _level(v: np.float32, random: np.uint32, x: _V) -> np.uint32:
    bits = to_bits(v)
    bits = bits if bits < LARGEST_V else LARGEST_V
    if x.shift == 24:
        at_least = to_bits(f4(f4(f4(i4(random)) * _SPREAD_SCALE) + _SPREAD_OFFSET))
        random = u4(u4(0x40800000) - at_least)
    return u4(u4(bits + random) >> x.shift)


@inlined
def _put_levels(s: Scratch, i: int, noise: np.uint32, x: _V) -> np.uint32:
    """Put the levels of v for i and i + 64; return the larger."""
    level_0 = _level(s.v[i], u4(noise & x.mask), x)
    level_1 = _level(s.v[i + HALF], u4(noise >> x.down), x)
    s.v_code[i], s.v_code[i + HALF] = level_0, level_1
    return level_0 if level_0 > level_1 else level_1


@inlined
def _top(level: np.uint32, x: _V) -> np.uint32:
    return u4((level if level > x.least else x.least) >> x.fine)


@inlined
def _most(first: np.uint32, x: _V) -> np.uint32:
    most = u4(first - x.least)
    return most if most < x.most else x.most


@inlined
def _first(top: np.uint32, x: _V) -> np.uint32:
    return u4(u4(top << x.fine) | x.below)


@inlined
def _code(first: np.uint32, level: np.uint32, most: np.uint32) -> np.uint32:
    code = u4(first - level)
    return code if code < most else most


class _BlockKernels(NamedTuple):
    """What a codec is, compiled; see the functions of these names at the end."""

    begin_decode: Any
    decode: Any
    begin_encode: Any
    encode: Any
    end_encode: Any


# ------------------------------------------------------------ 8 and 4 bits


def _linear_kernels(codec: Linear) -> _BlockKernels:
    x, bits = _v_of(codec), codec.bits
    steps = f4(2 ** (bits - 1) - 1)
    zero, last = f4(steps + 1), f4(2 * steps + 1)
    # A float from `zero` to `zero` + 1 with 8 random bits behind the point, and a half.
    fraction = 24 - bits
    pattern = u4(int(to_bits(zero)) | 1 << (fraction - 9))
    random_bits = u4(0xFF << (fraction - 8))
    left = u4(fraction - 8)

    @inlined
    def begin_decode(planes: Planes, b: int, s: Scratch) -> Any:
        step = to_float(u4(u4(planes.scale[b]) << u4(16)))
        return step, _first(u4(planes.top[b]), x)

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
            to_float(u4(u4(first - v_0) << x.shift)),
            to_float(u4(u4(first - v_1) << x.shift)),
        )

    @inlined
    def begin_encode(largest: np.uint32) -> Any:
        scale = u4(to_bits(f4(_to_largest(largest) / steps)) >> u4(16))
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
        noise = _hash(block, i, counter)
        inverse = state[1]
        s.m_code[i] = place(s.m[i], inverse, u4(noise << left))
        other = u4(u4(noise >> u4(9)) << left)
        s.m_code[i + HALF] = place(s.m[i + HALF], inverse, other)
        return _put_levels(s, i, noise, x)

    @inlined
    def end_encode(planes: Planes, b: int, s: Scratch, state: Any, level: Any) -> None:
        top = _top(level, x)
        planes.scale[b], planes.top[b] = np.uint16(state[0]), u1(top)
        first = _first(top, x)
        most = _most(first, x)
        for i in range(HALF):
            m_0, m_1 = s.m_code[i], s.m_code[i + HALF]
            v_0 = _code(first, s.v_code[i], most)
            v_1 = _code(first, s.v_code[i + HALF], most)
            if bits == 4:
                planes.m[b, i] = u1(m_0 | u4(m_1 << u4(4)))
                planes.v[b, i] = u1(v_0 | u4(v_1 << u4(4)))
            else:
                planes.m[b, i], planes.m[b, i + HALF] = u1(m_0), u1(m_1)
                planes.v[b, i], planes.v[b, i + HALF] = u1(v_0), u1(v_1)

    return _BlockKernels(begin_decode, decode, begin_encode, encode, end_encode)


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


def _projected_kernels(codec: Projected) -> _BlockKernels:
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
    def begin_decode(planes: Planes, b: int, s: Scratch) -> Any:
        _unpack_2(planes.m, b, s.m_code)
        _unpack_2(planes.v, b, s.v_code)
        if three_bits:
            _unpack_high(planes.m, b, s.m_code)
            _unpack_high(planes.v, b, s.v_code)
        step = to_float(u4(u4(planes.scale[b]) << u4(16)))
        return step, _first(u4(planes.top[b]), x)

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
            to_float(u4(u4(first - v_0) << x.shift)),
            to_float(u4(u4(first - v_1) << x.shift)),
        )

    @inlined
    def begin_encode(largest: np.uint32) -> Any:
        return u4(0), f4(0)

    @inlined
    def encode(s: Scratch, state: Any, i: int, block: Any, counter: Counter) -> Any:
        noise = _hash(block, i, counter)
        s.noise[i] = u4(noise & u4(0xFF))
        s.noise[i + HALF] = u4(u4(noise >> u4(9)) & u4(0xFF))
        return _put_levels(s, i, noise, x)

    @inlined
    def even_out(s: Scratch, first: np.uint32) -> np.float32:
        """Put v's codes, m times the root of v's decay; return the largest."""
        top, most = u4(0), _most(first, x)
        for i in range(BLOCK):
            code = _code(first, s.v_code[i], most)
            s.v_code[i] = code
            octaves = u4(u4(code << doubling) >> u4(1))
            m = f4(s.m[i] * to_float(u4(u4(octaves + u4(127)) << u4(23))))
            s.m[i] = m
            bits = magnitude(m)
            top = bits if bits > top else top
        return _to_largest(top)

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
        top = _top(level, x)
        planes.top[b] = u1(top)
        largest = even_out(s, _first(top, x))
        planes.scale[b] = encode_m(s, largest)
        _pack_2(s.m_code, planes.m, b)
        _pack_2(s.v_code, planes.v, b)
        if three_bits:
            _pack_high(s.m_code, planes.m, b)
            _pack_high(s.v_code, planes.v, b)

    return _BlockKernels(begin_decode, decode, begin_encode, encode, end_encode)


# ---------------------------------------------------------------- dispatch

_KERNELS = {
    Planes8: _linear_kernels(EIGHT),
    Planes4: _linear_kernels(FOUR),
    Planes3: _projected_kernels(THREE),
    Planes2: _projected_kernels(TWO),
}


def begin_decode(planes: Planes, b: int, s: Scratch) -> Any:
    """Prepare block b; return what `decode` needs of it."""
    return _KERNELS[type(planes)].begin_decode(planes, b, s)


def decode(planes: Planes, b: int, s: Scratch, header: Any, i: int) -> Any:
    """Return m of elements i and i + 64, then v of both."""
    return _KERNELS[type(planes)].decode(planes, b, s, header, i)


def begin_encode(planes: Planes, largest: np.uint32) -> Any:
    """Return what `encode` needs; ``largest`` is of all `magnitude` of m."""
    return _KERNELS[type(planes)].begin_encode(largest)


def encode(
    planes: Planes, s: Scratch, state: Any, i: int, block: np.uint32, counter: Counter
) -> np.uint32:
    """Encode what does not depend on other elements, for i and i + 64 in the scratch.

    Returns a level, whose maximum over all i `end_encode` needs.
    """
    return _KERNELS[type(planes)].encode(s, state, i, block, counter)


def end_encode(planes: Planes, b: int, s: Scratch, state: Any, level: Any) -> None:
    """Encode the rest and store it as block b."""
    _KERNELS[type(planes)].end_encode(planes, b, s, state, level)


def _kernels_of(planes: Any) -> _BlockKernels:
    return _KERNELS[planes.instance_class]


@overload(begin_decode, strict=False)
def _begin_decode(planes: Any, b: Any, s: Any) -> Any:  # noqa: ARG001
    run = _kernels_of(planes).begin_decode
    return lambda planes, b, s: run(planes, b, s)


@overload(decode, strict=False)
def _decode(planes: Any, b: Any, s: Any, header: Any, i: Any) -> Any:  # noqa: ARG001
    run = _kernels_of(planes).decode
    return lambda planes, b, s, header, i: run(planes, b, s, header, i)


@overload(begin_encode, strict=False)
def _begin_encode(planes: Any, largest: Any) -> Any:  # noqa: ARG001
    run = _kernels_of(planes).begin_encode
    return lambda planes, largest: run(largest)


@overload(encode, strict=False)
def _encode(planes: Any, s: Any, state: Any, i: Any, block: Any, counter: Any) -> Any:  # noqa: ARG001
    run = _kernels_of(planes).encode
    return lambda planes, s, state, i, block, counter: run(s, state, i, block, counter)


@overload(end_encode, strict=False)
def _end_encode(planes: Any, b: Any, s: Any, state: Any, level: Any) -> Any:  # noqa: ARG001
    run = _kernels_of(planes).end_encode
    return lambda planes, b, s, state, level: run(planes, b, s, state, level)
