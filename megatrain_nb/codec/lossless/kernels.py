"""Bits of floats to planes and back; importing this imports numba.

See [Note: 32 bits] in `megatrain_nb.codec.kernels` for the casts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy import uint16 as u2
from numpy import uint32 as u4

from megatrain_nb.jit import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    U16 = NDArray[np.uint16]
    U32 = NDArray[np.uint32]

_ONE, _FIFTEEN, _TWENTY_THREE = u4(1), u4(15), u4(23)
_FIFTEEN_BITS, _BYTE = u4(0x7FFF), u4(0xFF)


@kernel
def any_sign(bits: U32) -> bool:
    """Return whether a sign bit is set."""
    found = u4(0)
    for i in range(bits.size):
        found = u4(found | bits[i])
    return bool(u4(found >> u4(31)) != u4(0))


@kernel
def split_signed(bits: U32, low: U16, middle: U8, exponents: U8) -> None:
    """Write the planes of numbers of both signs; all arrays of one length."""
    for i in range(bits.size):
        x = u4(bits[i])
        low[i] = np.uint16(u4(u4(x << _ONE) | u4(x >> u4(31))) & u4(0xFFFF))
        middle[i] = np.uint8(u4(x >> _FIFTEEN) & _BYTE)
        exponents[i] = np.uint8(u4(x >> _TWENTY_THREE) & _BYTE)


@kernel
def join_signed(low: U16, middle: U8, exponents: U8, bits: U32) -> None:
    """Write the numbers that have these planes; all arrays of one length."""
    for i in range(bits.size):
        x = u4(u4(u4(middle[i]) << _FIFTEEN) | u4(u4(exponents[i]) << _TWENTY_THREE))
        end = u4(low[i])
        bits[i] = u4(u4(x | u4(end >> _ONE)) | u4(end << u4(31)))


@kernel
def split_positive(bits: U32, low: U16, middle: U8, exponents: U8) -> None:
    """Write the planes of numbers without a sign bit; their count is a multiple of 16."""
    sixteenth = bits.size // 16
    last = bits[15 * sixteenth :]
    for k in range(15):
        some, out = bits[k * sixteenth :], low[k * sixteenth :]
        place = u4(k)
        for j in range(sixteenth):
            bit = u4(u4(u4(last[j]) >> place) & _ONE)
            out[j] = np.uint16(
                u4(u4(u4(some[j]) & _FIFTEEN_BITS) | u4(bit << _FIFTEEN))
            )
    for i in range(bits.size):
        x = u4(bits[i])
        middle[i] = np.uint8(u4(x >> _FIFTEEN) & _BYTE)
        exponents[i] = np.uint8(u4(x >> _TWENTY_THREE) & _BYTE)


@kernel
def join_positive(low: U16, middle: U8, exponents: U8, bits: U32) -> None:
    """Write the numbers that have these planes; their count is a multiple of 16."""
    sixteenth = bits.size // 16
    for i in range(bits.size):
        bits[i] = u4(
            u4(u4(middle[i]) << _FIFTEEN) | u4(u4(exponents[i]) << _TWENTY_THREE)
        )
    last = bits[15 * sixteenth :]
    for k in range(15):
        some, source = bits[k * sixteenth :], low[k * sixteenth :]
        place = u4(k)
        for j in range(sixteenth):
            word = u4(source[j])
            some[j] = u4(u4(some[j]) | u4(word & _FIFTEEN_BITS))
            last[j] = u4(u4(last[j]) | u4(u4(word >> _FIFTEEN) << place))


@kernel
def split_half(bits: U16, low: U8, exponents: U8) -> None:
    """Write the planes of bf16 numbers; all arrays of one length."""
    for i in range(bits.size):
        x = u2(bits[i])
        low[i] = np.uint8(u2(u2(u2(x << u2(1)) | u2(x >> u2(15))) & u2(0xFF)))
        exponents[i] = np.uint8(u2(u2(x >> u2(7)) & u2(0xFF)))


@kernel
def join_half(low: U8, exponents: U8, bits: U16) -> None:
    """Write the bf16 numbers that have these planes; all arrays of one length."""
    for i in range(bits.size):
        end = u2(low[i])
        x = u2(u2(u2(exponents[i]) << u2(7)) | u2(end >> u2(1)))
        bits[i] = u2(x | u2(end << u2(15)))
