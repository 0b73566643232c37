"""What the compiled codecs share: memory for a block, the hash, and how v is stored.

The same bytes as the numpy codecs beside this file, which say what is done and why.
Loops run over the elements of a block, without a branch, so that LLVM makes vectors of
them; see [Note: 32 bits] for the casts. Importing this imports numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy import float32 as f4
from numpy import int32 as i4
from numpy import uint8 as u1
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.kernels import (
    FIRST_ODD_NAN,
    INFINITY,
    SIGNLESS,
    is_split,
    load,
    store,
    to_bits,
    to_float,
)
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
from megatrain_nb.codec.split import Split
from megatrain_nb.jit import inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain_nb.codec.base import F32, Key
    from megatrain_nb.codec.quantised.blocks import BlockCodec

_LINE = 64
_SPREAD_SCALE, _SPREAD_OFFSET = SPREAD
_F = tuple(u4(factor) for factor in FACTORS)


class Scratch(NamedTuple):
    """Memory for one block: its moments, and what it takes to encode them."""

    m: NDArray[np.float32]
    size: NDArray[np.float32]
    param: NDArray[np.float32]
    grad: NDArray[np.float32]
    denom: NDArray[np.float32]
    noise: NDArray[np.uint32]
    m_code: NDArray[np.uint32]
    v_code: NDArray[np.uint32]
    m_byte: NDArray[np.uint8]
    v_byte: NDArray[np.uint8]


class Counter(NamedTuple):
    """A `Key` as the kernels count."""

    block: np.uint32
    word_1: np.uint32
    word_2: np.uint32


def make_scratch() -> Scratch:
    """Return memory for one block; compiled, it is on the stack.

    So LLVM knows that it overlaps with no array, and need not ask in every loop.
    """
    m, size, param, grad, denom = np.zeros((5, BLOCK), np.float32)
    noise, m_code, v_code = np.zeros((3, BLOCK), np.uint32)
    m_byte, v_byte = np.zeros((2, BLOCK), np.uint8)
    return Scratch(
        *(m, size, param, grad, denom, noise, m_code, v_code, m_byte, v_byte)
    )


_alloca: Any = cgutils.alloca_once
_pointer: Any = types.CPointer


@intrinsic
def _stack_pointer(_typing: Any, dtype: Any) -> Any:
    """Return a pointer to `BLOCK` values on the stack."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        value_type = context.get_value_type(dtype.dtype)
        memory = _alloca(builder, value_type, size=BLOCK)
        memory.align = _LINE
        return memory

    return _pointer(dtype.dtype)(dtype), generate


_stack: Any = _stack_pointer


@overload(make_scratch, strict=False)
def _compiled_scratch() -> Any:
    return lambda: Scratch(
        carray(_stack(f4), BLOCK),
        carray(_stack(f4), BLOCK),
        carray(_stack(f4), BLOCK),
        carray(_stack(f4), BLOCK),
        carray(_stack(f4), BLOCK),
        carray(_stack(u4), BLOCK),
        carray(_stack(u4), BLOCK),
        carray(_stack(u4), BLOCK),
        carray(_stack(u1), BLOCK),
        carray(_stack(u1), BLOCK),
    )


def make_counter(key: Key) -> Counter:
    """Return where the dither begins."""
    return Counter(u4(key.first // BLOCK & 0xFFFFFFFF), *key_words(key))


# ------------------------------------------------------------------ shared


@inlined
def put_noise(s: Scratch, block: np.uint32, counter: Counter) -> None:
    """Put the random bits of a block, see `blocks.dither`."""
    for i in range(LANES):
        x = u4(u4(block * u4(LANES)) + u4(i))
        x = u4(u4(x ^ counter.word_1) * MULTIPLY_1)
        x = u4(u4(u4(x ^ u4(x >> u4(15))) + counter.word_2) * MULTIPLY_2)
        x = u4(x ^ u4(x >> u4(16)))
        # By hand: LLVM makes no vectors of a loop over the eight.
        s.noise[i] = u4(x * _F[0])
        s.noise[i + LANES] = u4(x * _F[1])
        s.noise[i + 2 * LANES] = u4(x * _F[2])
        s.noise[i + 3 * LANES] = u4(x * _F[3])
        s.noise[i + 4 * LANES] = u4(x * _F[4])
        s.noise[i + 5 * LANES] = u4(x * _F[5])
        s.noise[i + 6 * LANES] = u4(x * _F[6])
        s.noise[i + 7 * LANES] = u4(x * _F[7])


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


@inlined
def range_of(s: Scratch, x: V) -> tuple[np.uint32, np.uint32, np.uint32]:
    """Return the top of the levels in `v_code`, the first level, the largest code."""
    level = u4(0)
    for i in range(BLOCK):
        level = s.v_code[i] if s.v_code[i] > level else level
    if level > x.largest:  # an infinity
        level = x.largest
        for i in range(BLOCK):
            s.v_code[i] = min(s.v_code[i], level)
    top = u4((level if level > x.least else x.least) >> x.fine)
    first = first_of(top, x)
    room = u4(first - x.least)
    return top, first, room if room < x.most else x.most


@inlined
def code_of(first: np.uint32, level: np.uint32, most: np.uint32) -> np.uint32:
    """Return the code of a level."""
    code = u4(first - level)
    return code if code < most else most


@inlined
def first_of(top: np.uint32, x: V) -> np.uint32:
    """Return the level that has code 0."""
    return u4(u4(top << x.fine) | x.below)


@inlined
def v_of_code(first: np.uint32, code: np.uint32, x: V) -> np.float32:
    """Return v of a code, in a block whose code 0 is the level ``first``."""
    return to_float(u4(u4(first - code) << x.shift))


class BlockKernels(NamedTuple):
    """What a codec is, compiled; see the functions of these names at the end."""

    begin_decode: Any
    decode: Any
    level_of: Any
    begin_encode: Any
    encode: Any
    end_encode: Any


def begin_params(master: F32 | Split, s: Scratch) -> F32:
    """Return a block of parameters as fp32: itself, or in the scratch."""
    if not isinstance(master, Split):
        return master
    for i in range(BLOCK):
        s.param[i] = load(master, i)
    return s.param


def end_params(master: F32 | Split, s: Scratch) -> None:
    """Store what `begin_params` returned, if that is not the parameters themselves."""
    if isinstance(master, Split):
        for i in range(BLOCK):
            store(master, i, s.param[i])


@overload(begin_params, strict=False)
def _begin_params(master: Any, s: Any) -> Any:
    if not is_split(master):
        return lambda master, s: master

    def begin(master: Any, s: Any) -> Any:
        # The formula alone, and all again where it does not hold: see [Note: split].
        largest = u4(0)
        for i in range(BLOCK):
            rest = u4(i4(np.int16(master.lo[i])))
            bits = u4(u4(u4(master.hi[i]) << u4(16)) + rest)
            s.param[i] = to_float(bits)
            size = u4(bits & SIGNLESS)
            largest = size if size > largest else largest
        if largest >= FIRST_ODD_NAN:
            for i in range(BLOCK):
                s.param[i] = load(master, i)
        return s.param

    return begin


@overload(end_params, strict=False)
def _end_params(master: Any, s: Any) -> Any:
    if not is_split(master):
        return lambda master, s: None

    def end(master: Any, s: Any) -> None:
        largest = u4(0)
        for i in range(BLOCK):
            bits = to_bits(s.param[i])
            master.hi[i] = np.uint16(u4(bits + u4(0x8000)) >> u4(16))
            master.lo[i] = np.uint16(bits)
            size = u4(bits & SIGNLESS)
            largest = size if size > largest else largest
        if largest > INFINITY:
            for i in range(BLOCK):
                store(master, i, s.param[i])

    return end
