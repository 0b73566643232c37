"""What the compiled codecs share: memory for blocks, the hash, planes, and how v is stored.

The same bytes as the numpy codecs beside this file, which say what is done and why.
See [Note: 32 bits] for the casts. Importing this imports numba.

[Note: lanes]
Loops run over the 16 lanes of a vector, without a branch, and LLVM makes one straight
piece of code of each. What a lane does with its eight elements i, i + 16, i + 32 ... is
written out, since LLVM makes no vectors of loops in loops. So what the eight share stays
in a register: their hash, and the bytes that their codes are packed in.

[Note: narrow]
Levels and codes of v fit a byte (two with 8 bits), so four of a lane's eight share a word of
the scratch. Read as bytes, a vector of these has 64 elements instead of 16: the largest
level is found, and codes are made of levels, in a quarter of the instructions.

[Note: stages]
A block waits several times for a number that all its elements make: the largest, a sum.
Such a number takes some tens of cycles to go from a vector to a scalar, through a
division and back. So some blocks pass each stage together: while one waits, the next
one computes. And such numbers have stages of their own, between those with vectors: the
hundred instructions of a block that wait for a number fill the CPU's queue, and stop
all that comes behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy import float32 as f4
from numpy import uint8 as u1
from numpy import uint16 as u2
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.kernels import SIGNLESS, to_bits, to_float
from megatrain_nb.codec.quantised.blocks import (
    FACTORS,
    LANES,
    LARGEST,
    LARGEST_V,
    MULTIPLY_1,
    MULTIPLY_2,
    SPREAD,
    key_words,
)
from megatrain_nb.jit import SPLICED, inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain_nb.codec.base import Key
    from megatrain_nb.codec.quantised.blocks import BlockCodec, Planes

_LINE = 64
_SPREAD_SCALE, _SPREAD_OFFSET = SPREAD
FACTORS_U4 = tuple(u4(factor) for factor in FACTORS)

GROUP = 4
"""Blocks that pass the stages together, see [Note: stages]; their scratch stays in the first cache."""


class Scratch(NamedTuple):
    """Memory for `GROUP` blocks, or for one of them: what a stage leaves to the next."""

    m: NDArray[np.float32]
    denom: NDArray[np.float32]
    param: NDArray[np.float32]
    size: NDArray[np.float32]
    level: NDArray[np.uint32]
    """Of v, see `level_of`, then their codes; see `narrow_kernels`."""
    hash: NDArray[np.uint32]
    """One for each lane."""
    number: NDArray[np.uint32]
    """What all elements of a block make, and what follows: at `M_TOP` and so on; floats as patterns."""


M_TOP = 0
"""The largest `magnitude` of m."""
FIRST, MOST = 1, 2
"""The level that has code 0, the largest code of v."""
OWN = 3
"""Where numbers begin that only one kind of codec has."""


class Counter(NamedTuple):
    """A `Key` as the kernels count."""

    block: np.uint32
    word_1: np.uint32
    word_2: np.uint32


def make_scratch() -> Scratch:
    """Return memory for some blocks; compiled, it is on the stack.

    So LLVM knows that it overlaps with no array, and need not ask in every loop.
    """
    floats = np.zeros((4, GROUP, BLOCK), np.float32)
    return Scratch(*floats, *np.zeros((3, GROUP, BLOCK), np.uint32))


_alloca: Any = cgutils.alloca_once
_pointer: Any = types.CPointer


@intrinsic
def _stack_pointer(_typing: Any, dtype: Any) -> Any:
    """Return a pointer to values of `GROUP` blocks on the stack."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        value_type = context.get_value_type(dtype.dtype)
        memory = _alloca(builder, value_type, size=GROUP * BLOCK)
        memory.align = _LINE
        return memory

    return _pointer(dtype.dtype)(dtype), generate


_stack: Any = _stack_pointer
_SHAPE = (GROUP, BLOCK)


# Spliced: the memory lives as long as the function that numba writes it into.
@overload(make_scratch, strict=False, inline=SPLICED)
def _compiled_scratch() -> Any:
    return lambda: Scratch(
        carray(_stack(f4), _SHAPE),
        carray(_stack(f4), _SHAPE),
        carray(_stack(f4), _SHAPE),
        carray(_stack(f4), _SHAPE),
        carray(_stack(u4), _SHAPE),
        carray(_stack(u4), _SHAPE),
        carray(_stack(u4), _SHAPE),
    )


def make_block() -> NDArray[np.float32]:
    """Return memory for one block, as a row; compiled, it is on the stack."""
    return np.zeros((1, BLOCK), np.float32)


@overload(make_block, strict=False, inline=SPLICED)
def _compiled_block() -> Any:
    return lambda: carray(_stack(f4), (1, BLOCK))


@inlined
def scratch_of(s: Scratch, k: np.uintp) -> Scratch:
    """Return the memory of one block."""
    m, denom, param, size = s.m[k], s.denom[k], s.param[k], s.size[k]
    return Scratch(m, denom, param, size, s.level[k], s.hash[k], s.number[k])


def make_counter(key: Key) -> Counter:
    """Return where the dither begins."""
    return Counter(u4(key.first // BLOCK & 0xFFFFFFFF), *key_words(key))


# -------------------------------------------------------------------- v


@inlined
def hash_of(block: np.uint32, i: int, counter: Counter) -> np.uint32:
    """Return what a lane of a block has at random, see `blocks.dither`.

    An element's own is that times its one of `FACTORS_U4`.
    """
    x = u4(u4(block * u4(LANES)) + u4(i))
    x = u4(u4(x ^ counter.word_1) * MULTIPLY_1)
    x = u4(u4(u4(x ^ u4(x >> u4(15))) + counter.word_2) * MULTIPLY_2)
    return u4(x ^ u4(x >> u4(16)))


@inlined
def magnitude(value: np.float32) -> np.uint32:
    """Return the pattern without the sign: it sorts as the magnitude does."""
    return u4(to_bits(value) & SIGNLESS)


@inlined
def to_largest(bits: np.uint32) -> np.float32:
    """Return the float of a `magnitude`, at most the largest finite one."""
    return to_float(bits if bits < LARGEST else LARGEST)


class V(NamedTuple):
    """How a codec stores v: numbers that its kernels are compiled with."""

    shift: np.uint32
    down: np.uint32
    least: np.uint32
    largest: np.uint32
    most: np.uint32
    fine: np.uint32
    below: np.uint32
    widest: np.uint32
    """What has room in the scratch; infinity has."""


def v_of(codec: BlockCodec) -> V:
    """Return how a codec stores v."""
    fine = max(0, 23 - codec.shift)
    return V(
        shift=u4(codec.shift),
        down=u4(32 - codec.shift),
        least=u4(max(1, 1 << 23 >> codec.shift)),
        largest=u4(LARGEST_V >> u4(codec.shift)),
        most=u4(2**codec.bits - 1),
        fine=u4(fine),
        below=u4((1 << fine) - 1),
        widest=u4(0xFFFF if fine else 0xFF),
    )


@inlined
def level_of(v: np.float32, noise: np.uint32, x: V) -> np.uint32:
    """Return v as a level, not capped; `blocks.quantise_v` says what it is."""
    if x.shift == 24:
        one_to_two = to_float(u4(u4(noise >> u4(9)) | u4(0x3F800000)))
        at_least = to_bits(f4(f4(one_to_two * _SPREAD_SCALE) - _SPREAD_OFFSET))
        random = u4(u4(0x40800000) - at_least)
    else:
        random = u4(noise >> x.down)
    return u4(u4(to_bits(v) + random) >> x.shift)


class Narrow(NamedTuple):
    """How the levels of v lie in the scratch, see [Note: narrow]."""

    put: Any
    """Put the levels of a lane."""
    cut: Any
    """Make zeros of what lies behind a parameter's end."""
    top: Any
    """Return the largest level, and put no level above what is finite."""
    encode: Any
    """Make codes of levels, where they are."""
    pack: Any
    """Write a lane's codes into row b."""


def narrow_kernels(x: V, bits: int) -> Narrow:
    """Return how the levels of a codec of so many bits lie in the scratch.

    Bytes: those of elements k = 0 to 3 of a lane in one word, of 4 to 7 in another.
    Pairs of bytes: k and k + 4 in a word.
    """
    kind, per = (u2, 2) if x.fine else (u1, 4)
    words = BLOCK // per

    @inlined
    def put_bytes(s: Scratch, i: int, levels: Any) -> None:
        a, b, c, d, e, f, g, h = levels
        s.level[i], s.level[LANES + i] = four_bytes(a, b, c, d), four_bytes(e, f, g, h)

    @inlined
    def put_pairs(s: Scratch, i: int, levels: Any) -> None:
        a, b, c, d, e, f, g, h = levels
        s.level[i] = u4(a | u4(e << u4(16)))
        s.level[16 + i] = u4(b | u4(f << u4(16)))
        s.level[32 + i] = u4(c | u4(g << u4(16)))
        s.level[48 + i] = u4(d | u4(h << u4(16)))

    @inlined
    def cut(s: Scratch, size: int) -> None:
        levels = s.level[:words].view(kind)
        for j in range(size, BLOCK):
            k, i = j // LANES, j % LANES
            word, part = (k // 4, k % 4) if per == 4 else (k % 4, k // 4)
            levels[per * (LANES * word + i) + part] = 0

    @inlined
    def top(s: Scratch) -> np.uint32:
        levels, largest = s.level[:words].view(kind), kind(0)
        for j in range(BLOCK):
            largest = max_of(largest, levels[j])
        if largest > x.largest:  # an infinity
            largest = kind(x.largest)
            for j in range(BLOCK):
                levels[j] = min(levels[j], largest)
        return u4(largest)

    @inlined
    def encode(s: Scratch) -> None:
        levels = s.level[:words].view(kind)
        first, most = kind(s.number[FIRST]), kind(s.number[MOST])
        for j in range(BLOCK):
            code = kind(first - levels[j])
            levels[j] = code if code < most else most

    put, pack = put_bytes if per == 4 else put_pairs, pack_narrow_kernel(bits)
    return Narrow(put, cut, top, encode, pack)


@inlined
def four_bytes(a: np.uint32, b: np.uint32, c: np.uint32, d: np.uint32) -> np.uint32:
    """Return a word of four bytes, the first in the lowest bits."""
    left, right = u4(b << u4(8)), u4(u4(c << u4(16)) | u4(d << u4(24)))
    return u4(u4(a | left) | right)


@inlined
def begin_v(planes: Planes, b: np.uintp, s: Scratch, level: np.uint32, x: V) -> None:
    """Write the top of block b; put `FIRST` and `MOST`."""
    top = u4((level if level > x.least else x.least) >> x.fine)
    planes.top[b] = u1(top)
    first = first_of(top, x)
    room = u4(first - x.least)
    s.number[FIRST] = first
    s.number[MOST] = room if room < x.most else x.most


@inlined
def first_of(top: np.uint32, x: V) -> np.uint32:
    """Return the level that has code 0."""
    return u4(u4(top << x.fine) | x.below)


@inlined
def v_of_code(first: np.uint32, code: np.uint32, x: V) -> np.float32:
    """Return v of a code, in a block whose code 0 is the level ``first``."""
    return to_float(u4(u4(first - code) << x.shift))


class BlockKernels(NamedTuple):
    """What a codec is, compiled; see the functions of these names in kernels.py."""

    begin_decode: Any
    decode: Any
    level_of: Any
    put_levels: Any
    cut_levels: Any
    size_of: Any
    begin_encode: Any
    encode: Any
    begin_measure: Any
    measure: Any
    begin_rest: Any
    encode_rest: Any
    finish: Any


# ------------------------------------------------------------------ planes


@inlined
def max_of(a: Any, b: Any) -> Any:
    """Return the larger; a comparison that LLVM makes vectors of."""
    return a if a > b else b


@inlined
def largest_of(values: Any) -> Any:
    """Return the largest of a lane's eight."""
    a, b, c, d, e, f, g, h = values
    left, right = max_of(max_of(a, b), max_of(c, d)), max_of(max_of(e, f), max_of(g, h))
    return max_of(left, right)


def unpack_kernel(bits: int) -> Any:
    """Return the kernel that returns a code: element i + 16 k of row b."""
    each, mask = u4(bits), u4(2**bits - 1)

    @inlined
    def unpack(plane: NDArray[np.uint8], b: np.uintp, i: int, k: int) -> np.uint32:
        byte = u4(plane[b, LANES * (k % bits) + i])
        return u4(u4(byte >> u4(each * u4(k // bits))) & mask)

    @inlined
    def unpack_3(plane: NDArray[np.uint8], b: np.uintp, i: int, k: int) -> np.uint32:
        low = u4(u4(plane[b, LANES * (k % 2) + i]) >> u4(2 * (k // 2)))
        high = u4(u4(u4(plane[b, 32 + i]) << u4(2)) >> u4(k))
        return u4(u4(low & u4(3)) | u4(high & u4(4)))

    return unpack_3 if bits == 3 else unpack


def pack_kernel(bits: int) -> Any:
    """Return the kernel that writes a lane's eight codes, of 8 or 4 bits, into row b."""

    @inlined
    def pack_8(plane: NDArray[np.uint8], b: np.uintp, i: int, codes: Any) -> None:
        plane[b, i], plane[b, 16 + i] = u1(codes[0]), u1(codes[1])
        plane[b, 32 + i], plane[b, 48 + i] = u1(codes[2]), u1(codes[3])
        plane[b, 64 + i], plane[b, 80 + i] = u1(codes[4]), u1(codes[5])
        plane[b, 96 + i], plane[b, 112 + i] = u1(codes[6]), u1(codes[7])

    @inlined
    def pack_4(plane: NDArray[np.uint8], b: np.uintp, i: int, codes: Any) -> None:
        plane[b, i] = u1(codes[0] | u4(codes[4] << u4(4)))
        plane[b, 16 + i] = u1(codes[1] | u4(codes[5] << u4(4)))
        plane[b, 32 + i] = u1(codes[2] | u4(codes[6] << u4(4)))
        plane[b, 48 + i] = u1(codes[3] | u4(codes[7] << u4(4)))

    return {8: pack_8, 4: pack_4}[bits]


def pack_narrow_kernel(bits: int) -> Any:
    """Return the kernel that writes a lane's eight codes of v into row b, see `narrow_kernels`."""

    @inlined
    def pack_pairs(plane: NDArray[np.uint8], b: np.uintp, i: int, s: Scratch) -> None:
        for k in range(4):
            pair = s.level[LANES * k + i]
            plane[b, LANES * k + i] = u1(pair)
            plane[b, 64 + LANES * k + i] = u1(u4(pair >> u4(16)))

    if bits == 8:
        return pack_pairs
    pack_nibbles = pack_nibbles_kernel(bits)

    @inlined
    def pack(plane: NDArray[np.uint8], b: np.uintp, i: int, s: Scratch) -> None:
        low, high = s.level[i], s.level[LANES + i]
        pack_nibbles(plane, b, i, u4(low | u4(high << u4(4))))

    return pack


def pack_nibbles_kernel(bits: int) -> Any:
    """Return the kernel that writes a word of eight codes, see `nibbles`, into row b."""

    @inlined
    def pack_4(plane: NDArray[np.uint8], b: np.uintp, i: int, word: np.uint32) -> None:
        plane[b, i], plane[b, 16 + i] = u1(word), u1(u4(word >> u4(8)))
        plane[b, 32 + i] = u1(u4(word >> u4(16)))
        plane[b, 48 + i] = u1(u4(word >> u4(24)))

    @inlined
    def pack_2(plane: NDArray[np.uint8], b: np.uintp, i: int, word: np.uint32) -> None:
        both = u4(word | u4(word >> u4(14)))
        plane[b, i], plane[b, 16 + i] = u1(both), u1(u4(both >> u4(8)))

    @inlined
    def pack_3(plane: NDArray[np.uint8], b: np.uintp, i: int, word: np.uint32) -> None:
        pack_2(plane, b, i, u4(word & u4(0x33333333)))
        high = u4(u4(word >> u4(2)) & u4(0x11111111))
        left = u4(u4(high >> u4(14)) | u4(high >> u4(21)))
        plane[b, 32 + i] = u1(u4(u4(high | u4(high >> u4(7))) | left))

    return {4: pack_4, 3: pack_3, 2: pack_2}[bits]


@inlined
def nibbles(codes: Any) -> np.uint32:
    """Return a word of eight codes: k in byte k, and k + 4 in the upper half of that."""
    a, b, c, d, e, f, g, h = codes
    low = u4(u4(a | u4(b << u4(8))) | u4(u4(c << u4(16)) | u4(d << u4(24))))
    high = u4(
        u4(u4(e << u4(4)) | u4(f << u4(12))) | u4(u4(g << u4(20)) | u4(h << u4(28)))
    )
    return u4(low | high)
