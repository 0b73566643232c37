"""Memory that is a mapped file: which file, whether it was changed since, and giving its pages back.

What nobody has written to is the file's, so it can be read there: faults bring 128 kB at a time into the page cache, and
from there into this process, which is several times slower than reading the file past both.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from megatrain_nb.runtime.leaves import FilePart, InRam
from megatrain_nb.store.infile import InFile, identity_of

if TYPE_CHECKING:
    from megatrain_nb.runtime.lazy import Leaf

_MADV_PAGEOUT = 21
# Bits of an entry of /proc/self/pagemap (admin-guide/mm/pagemap of the kernel's documentation).
_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


class Mapped:
    """Which memory of this process is a mapped file, as the kernel says when this is made (proc(5), maps)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        # Of each: its end, where in the file it begins, device and inode of the file as text, and the path.
        self._maps: list[tuple[int, int, tuple[str, str], Path]] = []
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()  # fmt: skip
        except OSError:  # not Linux
            return
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                start, _, end = fields[0].partition("-")
                self._starts.append(int(start, 16))
                offset, file = int(fields[2], 16), (fields[3], fields[4])
                self._maps.append((int(end, 16), offset, file, Path(fields[5])))

    def holds(self, values: Tensor) -> bool:
        """Whether a tensor's values are in a mapped file."""
        return self._index(values) is not None

    def in_file(self, leaf: Leaf) -> FilePart | None:
        """Return where in its file a leaf is whose values are mapped from there and were not changed since; or None."""
        if not isinstance(leaf, InRam) or not leaf.values.is_contiguous():
            return None
        index = self._index(leaf.values)
        if index is None or _is_changed(leaf.values):
            return None
        first = leaf.values.data_ptr()
        end, offset, (device, inode), path = self._maps[index]
        if first + leaf.values.numel() * leaf.values.itemsize > end:
            return None
        with suppress(OSError):
            status = path.stat()
            number = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            if (number, str(status.st_ino)) == (device, inode):
                at = offset + first - self._starts[index]
                file = InFile(path, identity_of(status))
                return FilePart(leaf.name, file, at, leaf.shape, leaf.dtype)
        return None  # another file is there now, or none

    def let_go(self, values: Tensor) -> None:
        """Tell the kernel that values in a mapped file are not needed again, so that they need not stay in RAM.

        What somebody has changed in the mapping stays: the kernel drops only what it can read again (madvise(2),
        MADV_PAGEOUT, Linux 5.4). Where it cannot, nothing happens.
        """
        if not self.holds(values):
            return
        # One page that is shared with the neighbour is let go of twice.
        start, size = _pages(values)
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_PAGEOUT
        )

    def _index(self, values: Tensor) -> int | None:
        if values.device.type != "cpu" or type(values) not in (Tensor, nn.Parameter):
            return None
        first = values.data_ptr()
        index = bisect_right(self._starts, first) - 1
        return index if index >= 0 and first < self._maps[index][0] else None


def _is_changed(values: Tensor) -> bool:
    """Whether some page of a private mapping is not the file's any more; True where the kernel does not say."""
    start, size = _pages(values)
    count = -(-size // mmap.PAGESIZE)
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            file.seek(start // mmap.PAGESIZE * 8)
            data = file.read(count * 8)
    except OSError:
        return True
    if data is None or len(data) != count * 8:
        return True
    pages = np.frombuffer(data, np.uint64)
    here, of_file = (pages & _PRESENT) != 0, (pages & _OF_A_FILE) != 0
    swapped = (pages & _SWAPPED) != 0
    return bool((swapped | (here & ~of_file)).any())


def _pages(values: Tensor) -> tuple[int, int]:
    """Return where the first page of some values begins, and the bytes from there to their end."""
    first = values.data_ptr()
    start = first - first % mmap.PAGESIZE
    return start, first + values.numel() * values.itemsize - start
