"""Tiles of floats packed on their way to the disk, and unpacked on their way back.

A packed tile is one chunk after the other (see `megatrain_nb.codec.lossless.chunks`). It
passes through a window of fixed size: nothing of the tile's length is ever allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xxhash import xxh3_64

from megatrain_nb.codec.lossless.chunks import (
    CHUNK_NUMEL,
    HEADER_BYTES,
    DamagedError,
    Packer,
    most_bytes,
    packed_bytes,
)
from megatrain_nb.store.base import ALIGN_BYTES, round_up

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    Move = Callable[[int, U8], None]

_CARRY_BYTES = round_up(most_bytes(4 * CHUNK_NUMEL))
_WINDOW_BYTES = 4 << 20
STAGING_BYTES = _CARRY_BYTES + _WINDOW_BYTES + CHUNK_NUMEL
"""Memory that one thread needs to pack and unpack tiles of any length."""


class Packing:
    """What one thread needs for packed tiles.

    Parameters
    ----------
    memory : uint8, shape (STAGING_BYTES,), page-aligned
        Chunks that are cut by the window are carried over in its first part.
    """

    def __init__(self, memory: U8) -> None:
        self._memory = memory
        end = _CARRY_BYTES + _WINDOW_BYTES
        self._window = memory[_CARRY_BYTES:end]
        self._packer = Packer(memory[end : end + CHUNK_NUMEL])

    def write(self, data: U8, item_bytes: int, move: Move) -> tuple[int, int] | None:
        """Pack a tile.

        Parameters
        ----------
        data : uint8, C-contiguous
            Only read.
        item_bytes
            Of its floats.
        move
            Called with a place in the packed tile, in bytes, and what belongs there:
            whole pages, valid during the call.

        Returns
        -------
        tuple or None
            Length of the packed tile in bytes, and xxh3_64 of them; None, and nothing
            moved, where not even a page would be saved.
        """
        step, digest = CHUNK_NUMEL * item_bytes, xxh3_64()
        at = filled = 0
        for start in range(0, data.nbytes, step):
            part = data[start : start + step]
            filled += self._packer.pack(part, item_bytes, self._window[filled:])
            if start == 0 and not _pays(filled, data.nbytes, step):
                return None
            if _WINDOW_BYTES - filled < _CARRY_BYTES:
                whole = filled - filled % ALIGN_BYTES
                self._move_out(move, at, whole, digest)
                at, filled = at + whole, filled - whole
                self._window[:filled] = self._window[whole : whole + filled]
        if not at + filled:
            return None
        self._window[filled : round_up(filled)] = 0
        self._move_out(move, at, filled, digest)
        return at + filled, digest.intdigest()

    def read(self, packed: int, item_bytes: int, out: U8, move: Move) -> int:
        """Unpack a tile.

        Parameters
        ----------
        packed
            Its length on disk, in bytes.
        item_bytes
            Of its floats.
        out : uint8, C-contiguous, as long as what was packed
            Overwritten, also where the tile turns out to be damaged.
        move
            Called with a place in the packed tile, and whole pages to fill.

        Returns
        -------
        int
            xxh3_64 of the bytes on disk.

        Raises
        ------
        DamagedError
            They are not what `write` makes.
        """
        digest = xxh3_64()
        at = carried = done = 0
        while at < packed:
            length = min(_WINDOW_BYTES, packed - at)
            move(at, self._window[: round_up(length)])
            digest.update(self._window[:length].data)
            at += length
            start, stop = _CARRY_BYTES - carried, _CARRY_BYTES + length
            while True:
                size = packed_bytes(self._memory[start:stop])
                if size is None or size > stop - start:
                    break
                chunk = self._memory[start : start + size]
                done += self._packer.unpack(chunk, item_bytes, out[done:])
                start += size
            carried = stop - start
            self._memory[_CARRY_BYTES - carried : _CARRY_BYTES] = self._memory[
                start:stop
            ]
        if carried or done != out.nbytes:
            raise DamagedError("a packed tile is cut short")
        return digest.intdigest()

    def _move_out(self, move: Move, at: int, length: int, digest: xxh3_64) -> None:
        move(at, self._window[: round_up(length)])
        digest.update(self._window[:length].data)


def _pays(first: int, num_bytes: int, step: int) -> bool:
    """Whether a tile gets shorter if no chunk after the first one does."""
    left = num_bytes - min(step, num_bytes)
    most = first + left + HEADER_BYTES * 2 * -(-left // step)
    return round_up(most) < round_up(num_bytes)
