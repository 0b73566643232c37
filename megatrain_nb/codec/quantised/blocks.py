"""What the quantised codecs share: the layout, the dither, and how v is stored.

[Note: layout]
N elements are ceil(N / 128) blocks; what the last lacks counts as zeros. All of one kind
lies together, so that a part of the blocks is a part of each plane:

    m codes   16 * bits bytes for each block
    v codes   16 * bits bytes
    scale     2 bytes: bf16, of m
    top       1 byte: exponent of the largest v

Codes are packed in planes (Lemire and Boytsov, 2015, call it vertical): with 4 bits,
elements i and i + 64 of a block share byte i, the earlier in the low bits; with 2 bits
i, i + 32, i + 64 and i + 96. So a vector of bytes unpacks with shifts alone. With 3 bits
the two low bits of all codes come first, then the high bits, eight to a byte.

[Note: dither]
Elements i, i + 16, i + 32 ... of a block share one 32-bit hash of the block's number, i,
step and seed: each takes another multiple of it. An odd factor permutes the 32-bit
numbers, so every element's dither is as uniform as the hash. Two elements' dithers are
the points of a lattice in the plane; the factors were sought so that for all 28 pairs its
shortest vector is at least 0.75 of the longest possible (the spectral test of Coveyou and
MacPherson, 1967), modulo 2**32 for v, which takes the highest bits, and modulo 2**15 for
m, which takes bits 7 to 14. So pairs are as good as independent: a test shows it. Of one
element, the bits of m are the low ones of v, and rounding hangs on the high ones. Nothing
that needs no rounding is moved.

[Note: v]
v must follow increments of 0.1 % and less (1 - beta2), which rounding to nearest loses,
and 8 bits of dither lose too: v then never moves. v must not decode to 0: a zero there
beside a nonzero m is a division by eps. So v is rounded, without bias, to floats with
few bits, powers of 2 or 4 for 4 bits and less, down to the smallest normal one; its code
counts these downwards from the largest of the block. What is too small for that (2**-15
of the largest with 4 bits) is stored as the smallest that there is: updates get shorter
by it, never longer.

The bits of a float, read as an integer, count the floats. Adding any of the numbers below
``1 << shift`` and dropping `shift` bits rounds to one of two neighbours whose distance is
linear in the number: without bias. At shift 24 the neighbours are 1 and 4, and the bits
are not linear between; there the dither is spread so that the mean is right again.

[Note: count]
m is rounded by adding its dither and 256: a float from 256 to 512 has its whole part in
bits 15 to 22, and so the kernels need not convert it to an integer.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import numpy as np
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK, Codec, Key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from megatrain_nb.codec.base import F32, U8

    U16 = NDArray[np.uint16]
    U32 = NDArray[np.uint32]

HALF = BLOCK // 2
PASS = 512 * BLOCK
"""Elements that numpy encodes or decodes at once."""
HEADER_BYTES = 3
LARGEST_V = u4(0x7F000000)
"""2**127: what v is capped at, as an fp32 pattern."""
SMALLEST_SCALE = np.float32(2.0**-100)
"""A block of m with a smaller scale is all zeros; 1 / scale stays finite."""
LARGEST = u4(0x7F7FFFFF)
SPREAD = (np.float32(3), np.float32(2 - 2.0**-23))
COUNT = np.float32(256)
"""See [Note: count]."""
M_BITS, M_PATTERN = u4(0x7F80), u4(0x43800040)
"""Random bits of m, and `COUNT` and half of the lowest of them."""
MULTIPLY_1, MULTIPLY_2 = u4(0x7FEB352D), u4(0x846CA68B)
LANES = 16
"""Elements of a block with a hash of their own; fp32 numbers in an AVX-512 register."""
FACTORS = (
    *(0x00000001, 0x8306D03B, 0xADEC6F11, 0x7A98B9AD),
    *(0x5ABACBAF, 0x4268A581, 0x773F060D, 0xF62E92B1),
)
"""See [Note: dither]."""


class Planes(NamedTuple):
    """Views of an encoded array, see [Note: layout]; B blocks."""

    m: NDArray[np.uint8]
    """uint8, shape (B, 16 * bits)."""
    v: NDArray[np.uint8]
    """The same."""
    scale: NDArray[np.uint16]
    """bf16 bits, shape (B,)."""
    top: NDArray[np.uint8]
    """Shape (B,)."""

    def rows(self, part: slice) -> Self:
        """Return views of some of the blocks."""
        return type(self)(*(plane[part] for plane in self))  # type: ignore[arg-type]


class Planes8(Planes):
    """Of codec 8bit; a class for each, since numba tells them apart by it."""


class Planes4(Planes):
    """Of codec 4bit."""


class Planes3(Planes):
    """Of codec 3bit."""


class Planes2(Planes):
    """Of codec 2bit."""


_PLANES = {8: Planes8, 4: Planes4, 3: Planes3, 2: Planes2}


class BlockCodec(Codec):
    """A codec of 128 elements at a time.

    Attributes
    ----------
    bits
        Of a code, of m and of v alike.
    shift
        v is stored as its fp32 pattern without this many bits: 23 is powers of two.
    """

    bits: ClassVar[int]
    shift: ClassVar[int]

    @abstractmethod
    def quantise_m(self, m: F32, v_codes: U32, noise: U32) -> tuple[U32, U16]:
        """Return codes and scales of m; arrays of shape (B, 128) and (B,)."""

    @abstractmethod
    def restore_m(self, codes: U32, scale: U16, v_codes: U32) -> F32:
        """Return m, shape (B, 128)."""

    def encoded_bytes(self, numel: int) -> int:
        """Return whole blocks of codes, scale and top."""
        return -(-numel // BLOCK) * (2 * self._row_bytes() + HEADER_BYTES)

    def planes(self, encoded: U8) -> Planes:
        """Return views of the planes of an encoded array."""
        row = self._row_bytes()
        blocks = encoded.size // (2 * row + HEADER_BYTES)
        v, scale, top = row * blocks, 2 * row * blocks, (2 * row + 2) * blocks
        return _PLANES[self.bits](
            encoded[:v].reshape(blocks, row),
            encoded[v:scale].reshape(blocks, row),
            encoded[scale:top].view(np.uint16),
            encoded[top : top + blocks],
        )

    def _row_bytes(self) -> int:
        return self.bits * BLOCK // 8

    def _blank(self, out: U8) -> None:
        zeros = np.zeros(BLOCK, np.float32)
        one = np.empty(self.encoded_bytes(BLOCK), np.uint8)
        self._encode(zeros, zeros, one, Key(0, 0, 0))
        many, row = self.planes(out), self.planes(one)
        many.m[:], many.v[:], many.scale[:], many.top[:] = row

    def _encode(self, exp_avg: F32, exp_avg_sq: F32, out: U8, key: Key) -> None:
        planes = self.planes(out)
        for part, rows in _passes(exp_avg.size):
            some = planes.rows(rows)
            noise = dither(key._replace(first=key.first + part.start), len(some.top))
            v_codes, top = quantise_v(
                _blocks(exp_avg_sq[part]), noise, self.bits, self.shift
            )
            with np.errstate(all="ignore"):  # inf and 1e38 are the codec's business
                m_codes, scale = self.quantise_m(_blocks(exp_avg[part]), v_codes, noise)
            some.m[:], some.v[:] = pack(m_codes, self.bits), pack(v_codes, self.bits)
            some.scale[:], some.top[:] = scale, top

    def _decode(self, encoded: U8, exp_avg: F32, exp_avg_sq: F32) -> None:
        planes = self.planes(encoded)
        for part, rows in _passes(exp_avg.size):
            some = planes.rows(rows)
            v_codes, m_codes = unpack(some.v, self.bits), unpack(some.m, self.bits)
            m = self.restore_m(m_codes, some.scale, v_codes)
            v = restore_v(v_codes, some.top, self.shift)
            size = part.stop - part.start
            exp_avg[part], exp_avg_sq[part] = m.ravel()[:size], v.ravel()[:size]


def _passes(size: int) -> Iterator[tuple[slice, slice]]:
    """Yield elements and blocks of one pass, so that numpy's temporaries stay small."""
    for start in range(0, size, PASS):
        stop = min(start + PASS, size)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))


# ----------------------------------------------------------------- planes


def pack(codes: U32, bits: int) -> U8:
    """Return the packed codes; (B, 128) to (B, 16 * bits), see [Note: layout]."""
    if bits == 3:
        return np.hstack([pack(codes & u4(3), 2), pack(codes >> u4(2), 1)])
    each = codes.reshape(len(codes), 8 // bits, 16 * bits)
    places = np.arange(8 // bits, dtype=np.uint32)[:, None] * u4(bits)
    packed: U8 = np.bitwise_or.reduce(each << places, axis=1).astype(np.uint8)
    return packed


def unpack(packed: U8, bits: int) -> U32:
    """Return what `pack` was given."""
    if bits == 3:
        low, high = unpack(packed[:, :32], 2), unpack(packed[:, 32:], 1)
        return low | high << u4(2)
    places = np.arange(8 // bits, dtype=np.uint32)[:, None] * u4(bits)
    each = packed[:, None, :].astype(np.uint32) >> places & u4(2**bits - 1)
    return each.reshape(len(packed), BLOCK)


# ----------------------------------------------------------------- dither


def key_words(key: Key) -> tuple[np.uint32, np.uint32]:
    """Return step and seed as two words (splitmix64: Steele, Lea and Flood, 2014)."""
    mask = 2**64 - 1
    word = ((key.seed << 32 | key.step) + 0x9E3779B97F4A7C15) & mask
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    word ^= word >> 31
    return u4(word & 0xFFFFFFFF), u4(word >> 32)


def dither(key: Key, blocks: int) -> U32:
    """Return 32 random bits for each element, shape (blocks, 128).

    The hash: two rounds of multiplication and xor-shift (Wellons, 2018), a word of the
    key before each; see [Note: dither].
    """
    word_1, word_2 = key_words(key)
    first = key.first // BLOCK
    block = np.arange(first, first + blocks, dtype=np.uint64).astype(np.uint32)
    lane = np.arange(LANES, dtype=np.uint32)
    x: U32 = block[:, None] * u4(LANES) + lane
    x = (x ^ word_1) * MULTIPLY_1
    x = ((x ^ x >> u4(15)) + word_2) * MULTIPLY_2
    x = x ^ x >> u4(16)
    factors = np.array(FACTORS, np.uint32)[:, None]
    out: U32 = (x[:, None, :] * factors).reshape(blocks, BLOCK)
    return out


def m_dither(noise: U32) -> F32:
    """Return `COUNT` and a fraction of 8 random bits and a half, shape (B, 128)."""
    dithered: F32 = (noise & M_BITS | M_PATTERN).view(np.float32)
    return dithered


# ---------------------------------------------------------------------- v


def quantise_v(v: F32, noise: U32, bits: int, shift: int) -> tuple[U32, U8]:
    """Return codes (B, 128) and tops (B,) of v, see [Note: v]."""
    level = (v.view(np.uint32) + _spread(noise, shift)) >> u4(shift)
    level = np.minimum(level, u4(LARGEST_V >> u4(shift)))
    fine = max(0, 23 - shift)  # bits of a level below the exponent
    least = u4(max(1, 1 << 23 >> shift))
    top = np.maximum(level.max(axis=1), least) >> u4(fine)
    first = _first(top, fine)
    codes = np.minimum(first - level, np.minimum(first - least, u4(2**bits - 1)))
    return codes, top.astype(np.uint8)


def restore_v(codes: U32, top: U8, shift: int) -> F32:
    """Return v, shape (B, 128)."""
    level = _first(top.astype(np.uint32), max(0, 23 - shift)) - codes
    v: F32 = (level << u4(shift)).view(np.float32)
    return v


def _first(top: U32, fine: int) -> U32:
    """Return the level that has code 0."""
    return (top << u4(fine) | u4((1 << fine) - 1))[:, None]


def _spread(noise: U32, shift: int) -> U32:
    """Return what to add to a pattern before `shift` bits are dropped."""
    if shift <= 23:
        return noise >> u4(32 - shift)
    # Up from 1 to 4 if the number is at least 1 + 3 u: compare patterns. The random
    # float is 1 + u.
    scale, offset = SPREAD
    random = (noise >> u4(9) | u4(0x3F800000)).view(np.float32)
    at_least = (random * scale - offset).view(np.uint32)
    return u4(0x3F800000 + (1 << 24)) - at_least


# ---------------------------------------------------------------------- m


def bf16_down(values: F32) -> U16:
    """Return the bf16 bits of positive numbers, rounded down."""
    return (values.view(np.uint32) >> u4(16)).astype(np.uint16)


def from_bf16(bits: U16) -> F32:
    """Return the numbers."""
    return (bits.astype(np.uint32) << u4(16)).view(np.float32)


def largest(m: F32) -> F32:
    """Return the largest magnitude in each row, at most the largest finite float."""
    pattern = (m.view(np.uint32) & u4(0x7FFFFFFF)).max(axis=1)
    top: F32 = np.minimum(pattern, LARGEST).view(np.float32)
    return top


def _blocks(values: F32) -> F32:
    """Return the values as rows of 128, zeros at the end."""
    missing = -values.size % BLOCK
    if missing:
        values = np.concatenate([values, np.zeros(missing, np.float32)])
    return values.reshape(-1, BLOCK)
