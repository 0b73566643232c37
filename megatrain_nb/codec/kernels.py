"""Kernels of the codecs; importing this imports numba.

[Note: 32 bits]
Numba computes int32 + int32 in int64, which halves the width of vectors and has no
fast multiplication. So every integer operation is cast back at once: ``u4(a + b)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy import int32 as i4
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.split import Split
from megatrain_nb.jit import inlined, kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    U16 = NDArray[np.uint16]
    Floats = F32 | U16 | Split

SIGNLESS = u4(0x7FFFFFFF)
INFINITY = u4(0x7F800000)
FIRST_ODD_NAN = u4(0x7F808000)  # its place, with those up to 0x7F80FFFF, is ...
_FIRST_ODD_PLACE = u4(0x7FFF8000)  # ... below the zero of the other sign
_HALF = u4(0x8000)
_SIXTEEN = u4(16)


@kernel
def to_bits(value: np.float32) -> np.uint32:
    """Return the pattern of a float."""
    return np.float32(value).view(np.uint32)  # numba wants the cast it does not need


@kernel
def to_float(bits: np.uint32) -> np.float32:
    """Return the float of a pattern."""
    return np.uint32(bits).view(np.float32)


@kernel
def split_bits(bits: np.uint32) -> tuple[np.uint32, np.uint32]:
    """Return the upper and the lower half of an fp32 pattern, see [Note: split]."""
    size = u4(bits & SIGNLESS)
    up = _HALF
    if size > INFINITY:
        odd = u4(size - FIRST_ODD_NAN) < _HALF
        up = u4(_FIRST_ODD_PLACE + _HALF - FIRST_ODD_NAN) if odd else u4(0)
    return u4(u4(bits + up) >> _SIXTEEN), u4(bits & u4(0xFFFF))


@kernel
def join_bits(hi: np.uint32, lo: np.uint32) -> np.uint32:
    """Return the fp32 pattern that has these halves."""
    upper = u4(hi << _SIXTEEN)
    if u4(upper & SIGNLESS) > INFINITY:
        return u4(upper | lo)
    bits = u4(u4(upper + lo) - u4(u4(lo & _HALF) << u4(1)))
    if u4(bits & SIGNLESS) >= _FIRST_ODD_PLACE:
        return u4(bits - u4(_FIRST_ODD_PLACE - FIRST_ODD_NAN))
    return bits


@kernel
def join_finite(hi: np.uint16, lo: np.uint16) -> np.uint32:
    """Return what `join_bits` does, where that is below `FIRST_ODD_NAN`."""
    return u4(u4(u4(hi) << _SIXTEEN) + u4(i4(np.int16(lo))))


@kernel
def split(master: F32, hi: U16, lo: U16) -> None:
    """Write the halves of every number; all arrays of one length."""
    for i in range(master.size):
        upper, lower = split_bits(to_bits(master[i]))
        hi[i], lo[i] = np.uint16(upper), np.uint16(lower)


@kernel
def join(hi: U16, lo: U16, master: F32) -> None:
    """Write the numbers that have these halves; all arrays of one length."""
    for i in range(hi.size):
        master[i] = to_float(join_bits(u4(hi[i]), u4(lo[i])))


@inlined
def put(array: Any, i: Any, value: Any) -> None:
    """Set an element of an array; what `spliced` kernels must call."""
    array[i] = value


def load(array: Floats, i: Any) -> np.float32:
    """Return number i of an fp32 array, of a bf16 array (uint16) or of a `Split`."""
    if isinstance(array, Split):
        return to_float(join_bits(u4(array.hi[i]), u4(array.lo[i])))
    if array.dtype == np.uint16:
        return to_float(u4(u4(array[i]) << _SIXTEEN))
    return np.float32(array[i])


def store(array: F32 | Split, i: int, value: np.float32) -> None:
    """Set number i of an fp32 array or of a `Split`."""
    if isinstance(array, Split):
        hi, lo = split_bits(to_bits(value))
        array.hi[i], array.lo[i] = np.uint16(hi), np.uint16(lo)
    else:
        array[i] = value


def window(array: Floats, start: int, stop: int) -> Floats:
    """Return a view of some numbers."""
    part = slice(start, stop)
    return array.part(part) if isinstance(array, Split) else array[part]


def rows(array: Floats) -> Floats:
    """Return a view of whole blocks, a row for each."""
    if isinstance(array, Split):
        return Split(array.hi.reshape(-1, BLOCK), array.lo.reshape(-1, BLOCK))
    return array.reshape(-1, BLOCK)


def row(array: Floats, b: np.uintp) -> Floats:
    """Return a view of a row."""
    return Split(array.hi[b], array.lo[b]) if isinstance(array, Split) else array[b]


@overload(window, strict=False)
def _compiled_window(array: Any, start: Any, stop: Any) -> Any:
    if is_split(array):
        return lambda array, start, stop: Split(
            array.hi[start:stop], array.lo[start:stop]
        )
    return lambda array, start, stop: array[start:stop]


@overload(rows, strict=False)
def _compiled_rows(array: Any) -> Any:
    if is_split(array):
        return lambda array: Split(
            array.hi.reshape(array.hi.size // BLOCK, BLOCK),
            array.lo.reshape(array.lo.size // BLOCK, BLOCK),
        )
    return lambda array: array.reshape(array.size // BLOCK, BLOCK)


@overload(row, strict=False)
def _compiled_row(array: Any, b: Any) -> Any:
    if is_split(array):
        return lambda array, b: Split(array.hi[b], array.lo[b])
    return lambda array, b: array[b]


@overload(load, strict=False)
def _compiled_load(array: Any, i: Any) -> Any:
    if is_split(array):
        return lambda array, i: to_float(join_bits(u4(array.hi[i]), u4(array.lo[i])))
    if array.dtype == types.uint16:
        return lambda array, i: to_float(u4(u4(array[i]) << _SIXTEEN))
    return lambda array, i: array[i]


@overload(store, strict=False)
def _compiled_store(array: Any, i: Any, value: Any) -> Any:
    if not is_split(array):

        def store(array: Any, i: Any, value: Any) -> None:
            array[i] = value

        return store

    def store_halves(array: Any, i: Any, value: Any) -> None:
        hi, lo = split_bits(to_bits(value))
        array.hi[i] = np.uint16(hi)
        array.lo[i] = np.uint16(lo)

    return store_halves


def is_split(array: Any) -> bool:
    """Return whether a numba type is that of a `Split`."""
    return isinstance(array, types.NamedUniTuple) and array.instance_class is Split
