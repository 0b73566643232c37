"""Floats packed bit for bit: their exponents take few values, the rest is noise.

[Note: chunk]
A chunk is up to 2**18 floats of 4 or 2 bytes (fp32, bf16), packed on its own:

    kind          1 byte: 0 plain, 1 signed, 2 positive
    item bytes    1 byte: 4 or 2
    0             2 bytes
    count         4 bytes, little-endian, as everything here: N floats
    frame         4 bytes: length F of the frame
    0             4 bytes
    planes, then a zstd frame (RFC 8878) of the N exponents, one byte each; or, if plain,
    the floats as they are
    zeros up to a multiple of 16 bytes

The planes hold what is not exponent. Of fp32, *signed*: 16 bits (the lower 15 of the
mantissa, then the sign as the lowest), N words; then the upper 8 bits of the mantissa,
N bytes. Of bf16: 7 bits of mantissa, then the sign, N bytes. *Positive* is fp32 where no
sign bit is set and N is a multiple of 16: N / 16 * 15 words of 15 bits of mantissa, and in
their highest bits, word k of a group, bit k of the 16th group; then N bytes as above.

Any pattern of bits is a float here, so a NaN keeps its payload. Where the frame is not
at least 1/32 shorter than the exponents, or the length is no whole number of floats, the
chunk is plain.

[Note: zstd]
zstd has no mode that only entropy-codes. A tiny hash table, matches of 7 bytes and more,
and a search that skips ahead come close: few matches are looked for. 64 entries do where
neighbours are not alike; 256 find rows of equal exponents, as v has them, for 0.5 % more.

References
----------
ZipNN (Hershcovitch et al., arXiv 2411.05239): exponents of trained models in a plane of
their own, Huffman-coded. The layout and the planes of positive numbers are this package's own.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_nb.codec.arrays import check_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]

CHUNK_NUMEL = 1 << 18
"""Most floats in a chunk."""
HEADER_BYTES = 16
ITEM_BYTES = {"lossless32": 4, "lossless16": 2}
"""By name of the packing: bytes of its floats."""

_HEADER = struct.Struct("<BBHIII")
_PLAIN, _SIGNED, _POSITIVE = range(3)
_LEAST_SHARE = 32


class DamagedError(ValueError):
    """Bytes that no packer has made."""


def name_of(item_bytes: int) -> str:
    """Return the packing of floats of this many bytes.

    Examples
    --------
    >>> name_of(2)
    'lossless16'
    """
    return {size: name for name, size in ITEM_BYTES.items()}[item_bytes]


def most_bytes(num_bytes: int) -> int:
    """Return the most bytes that a chunk of ``num_bytes`` unpacked ones can take."""
    return _round_up(HEADER_BYTES + num_bytes)


def packed_bytes(start: U8) -> int | None:
    """Return the length of the chunk that begins here; None if its header is not whole.

    Raises
    ------
    DamagedError
        These bytes begin no chunk.
    """
    if start.size < HEADER_BYTES:
        return None
    kind, item_bytes, zero, count, frame, zeros = _HEADER.unpack_from(start.data)
    fits = 0 < count <= CHUNK_NUMEL * (1 if kind else item_bytes)
    if item_bytes not in ITEM_BYTES.values() or zero or zeros or not fits:
        raise DamagedError("a chunk's header is not one")
    planes = _planes_bytes(kind, item_bytes, count)
    if frame > count or (kind == _PLAIN and frame):
        raise DamagedError("a chunk's header has impossible lengths")
    return _round_up(HEADER_BYTES + planes + frame)


class Packer:
    """Packs and unpacks chunks, on one thread at a time.

    Parameters
    ----------
    exponents : uint8, shape (CHUNK_NUMEL,), C-contiguous
        Scratch.
    """

    def __init__(self, exponents: U8) -> None:
        check_array("exponents", exponents, np.uint8, CHUNK_NUMEL, writeable=True)
        import zstandard  # noqa: PLC0415

        self._zstd: Any = zstandard
        self._exponents = exponents
        self._compressors = {
            kind: zstandard.ZstdCompressor(
                compression_params=zstandard.ZstdCompressionParameters(
                    strategy=zstandard.STRATEGY_FAST,
                    window_log=18,
                    hash_log=hash_log,
                    chain_log=6,
                    search_log=1,
                    min_match=7,
                    target_length=0,
                    write_content_size=True,
                )
            )
            for kind, hash_log in ((_SIGNED, 6), (_POSITIVE, 8))
        }
        self._decompressor = zstandard.ZstdDecompressor()

    def pack(self, values: U8, item_bytes: int, out: U8) -> int:
        """Write one chunk and return its length, a multiple of 16.

        Parameters
        ----------
        values : uint8, C-contiguous, at least 1 and at most CHUNK_NUMEL * item_bytes
            The bytes of the floats; only read.
        item_bytes
            4 for fp32, 2 for bf16.
        out : uint8, C-contiguous, at least `most_bytes` of them
            Aligned to 16 bytes; its beginning is overwritten.
        """
        count, rest = divmod(values.size, item_bytes)
        frame = b""
        kind = _PLAIN if rest or values.ctypes.data % item_bytes else _SIGNED
        if kind:
            kind = self._split(values, item_bytes, count, out[HEADER_BYTES:])
            exponents = self._exponents[:count]
            frame = self._compressors[kind].compress(exponents.data)
            if len(frame) > count - count // _LEAST_SHARE:
                kind = _PLAIN
        if kind == _PLAIN:
            count, frame, end = values.size, b"", HEADER_BYTES + values.size
            out[HEADER_BYTES:end] = values
        else:
            start = HEADER_BYTES + _planes_bytes(kind, item_bytes, count)
            end = start + len(frame)
            out[start:end] = np.frombuffer(frame, np.uint8)
        _HEADER.pack_into(out.data, 0, kind, item_bytes, 0, count, len(frame), 0)
        out[end : _round_up(end)] = 0
        return _round_up(end)

    def unpack(self, packed: U8, item_bytes: int, out: U8) -> int:
        """Write the floats of one chunk and return how many bytes they are.

        Parameters
        ----------
        packed : uint8, C-contiguous, of the length that `packed_bytes` says
            Aligned to 16 bytes; only read.
        item_bytes
            Of the floats that are expected.
        out : uint8, C-contiguous
            Its beginning is overwritten, also where the chunk turns out to be damaged.

        Raises
        ------
        DamagedError
            No chunk, of another kind of floats, or longer than ``out``.
        """
        size = packed_bytes(packed)
        if size != packed.size:
            raise DamagedError("a chunk is cut short")
        kind, found, _, count, frame, _ = _HEADER.unpack_from(packed.data)
        num_bytes: int = count if kind == _PLAIN else count * item_bytes
        if found != item_bytes or num_bytes > out.size:
            raise DamagedError("a chunk is of other floats, or of more than expected")
        if kind == _PLAIN:
            out[:count] = packed[HEADER_BYTES : HEADER_BYTES + count]
            return num_bytes
        planes = _planes_bytes(kind, item_bytes, count)
        start = HEADER_BYTES + planes
        exponents = self._unpack_exponents(packed[start : start + frame], count)
        body = packed[HEADER_BYTES:start]
        self._join(kind, item_bytes, body, exponents, out[:num_bytes])
        return num_bytes

    def _split(self, values: U8, item_bytes: int, count: int, out: U8) -> int:
        from megatrain_nb.codec.lossless import kernels  # noqa: PLC0415

        exponents = self._exponents[:count]
        if item_bytes == 2:
            kernels.split_half(values.view(np.uint16), out[:count], exponents)
            return _SIGNED
        bits = values.view(np.uint32)
        positive = count % 16 == 0 and not kernels.any_sign(bits)
        kind, split = (
            (_POSITIVE, kernels.split_positive)
            if positive
            else (_SIGNED, kernels.split_signed)
        )
        low, middle = _planes(out[: _planes_bytes(kind, 4, count)], count)
        split(bits, low, middle, exponents)
        return kind

    @staticmethod
    def _join(kind: int, item_bytes: int, planes: U8, exponents: U8, out: U8) -> None:
        from megatrain_nb.codec.lossless import kernels  # noqa: PLC0415

        # Joined in aligned memory: numba takes no other, and a caller may have any.
        aligned = out.ctypes.data % item_bytes == 0
        target = out if aligned else np.empty(out.size, np.uint8)
        if item_bytes == 2:
            kernels.join_half(planes, exponents, target.view(np.uint16))
        else:
            low, middle = _planes(planes, exponents.size)
            join = kernels.join_signed if kind == _SIGNED else kernels.join_positive
            join(low, middle, exponents, target.view(np.uint32))
        if not aligned:
            out[:] = target

    def _unpack_exponents(self, frame: U8, count: int) -> U8:
        error = self._zstd.ZstdError
        try:
            # A frame that says another size is not ours, and must not get memory for it.
            if self._zstd.frame_content_size(frame.data) != count:
                raise DamagedError("a chunk's exponents are not as many as its floats")
            data = self._decompressor.decompress(frame.data, allow_extra_data=False)
        except error as reason:
            msg = f"a chunk's exponents do not unpack: {reason}"
            raise DamagedError(msg) from reason
        if len(data) != count:
            raise DamagedError("a chunk's exponents are not as many as its floats")
        return np.frombuffer(data, np.uint8)


def warm_up() -> None:
    """Compile the kernels or load them from the cache."""
    packer = Packer(np.zeros(CHUNK_NUMEL, np.uint8))
    for size in ITEM_BYTES.values():
        for sign in (0, 0x80):
            values, back = np.zeros((2, 1024 * size), np.uint8)
            values[-1] = sign
            out = np.zeros(most_bytes(values.size), np.uint8)
            packer.unpack(out[: packer.pack(values, size, out)], size, back)


def _planes_bytes(kind: int, item_bytes: int, count: int) -> int:
    """Return the length of what is not the frame."""
    if kind == _PLAIN:
        return count
    if kind == _POSITIVE:
        if item_bytes != 4 or count % 16:
            raise DamagedError("a chunk's header has impossible lengths")
        return count // 16 * 30 + count
    if kind != _SIGNED:
        raise DamagedError("a chunk is of an unknown kind")
    return count * (item_bytes - 1)


def _planes(body: U8, count: int) -> tuple[NDArray[np.uint16], U8]:
    """Return the words and the bytes of an fp32 chunk's planes."""
    words = body.size - count
    return body[:words].view(np.uint16), body[words:]


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // HEADER_BYTES) * HEADER_BYTES
