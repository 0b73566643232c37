"""Files from elsewhere that are read in stretches, past the page cache where they are not in it."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.errors import StoreError
from megatrain_nb.store.base import ALIGN_BYTES, round_up
from megatrain_nb.store.host import map_pages
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

# Of a stretch in a file only whole pages can be read past the page cache, so it is copied out of a buffer: one for
# each thread that reads. Shorter stretches are not worth it.
_BUFFER_BYTES, _LEAST_BYTES = 8 << 20, 1 << 20
_BUFFERS = threading.local()


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a small file from anywhere: a link is not followed, a pipe not waited for.

    Raises
    ------
    OSError
        It is missing, not a regular file, or longer than ``most_bytes``: its ``strerror`` says so.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, f"{path.name} is not a file")
        if status.st_size > most_bytes:
            msg = (
                f"{path.name} is {format_bytes(status.st_size)} long, and {format_bytes(max(most_bytes, 0))} are allowed: "
                "it is damaged, or max_ram_gb is too small for it"
            )
            raise OSError(0, msg)
        return file.read(status.st_size)


@dataclass(eq=False)
class InFile:
    """A file; open only while it is read, because there may be thousands of them.

    It has to stay the file that it was at the first read: one that was written anew meanwhile is refused.

    Attributes
    ----------
    path
        Where it is.
    identity
        Which file has to be there (`identity_of`); None for the one of the first read.
    """

    path: Path
    identity: tuple[int, ...] | None = None

    def read_into(self, data: memoryview, offset: int) -> None:
        """Fill ``data`` with the bytes from ``offset`` on; any thread may.

        Raises
        ------
        StoreError
            The disk failed, or the file is another one now, or shorter, than at the first read.
        """
        values = np.frombuffer(data, np.uint8)
        try:
            with self._opened() as number:
                cached = values.size < _LEAST_BYTES or _in_cache(number, offset)
                if cached or not self._read_past_cache(values, offset):
                    self._read(number, values, offset)
        except OSError as error:
            msg = f"reading {self.path} at byte {offset} failed: {error.strerror}"
            raise StoreError(msg) from error

    def num_bytes(self) -> int:
        """Return its length."""
        try:
            return self.path.stat().st_size
        except OSError as error:
            msg = f"{self.path}: {error.strerror}"
            raise StoreError(msg) from error

    @contextmanager
    def _opened(self, flags: int = 0) -> Iterator[int]:
        number = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            now = identity_of(os.fstat(number))
            if self.identity not in (None, now):
                msg = f"{self.path} was written anew while it was being loaded; load it again when that is over"
                raise StoreError(msg)
            self.identity = now
            yield number
        finally:
            os.close(number)

    def _read(self, number: int, values: NDArray[np.uint8], offset: int) -> None:
        view, done = values.data, 0
        while done < values.size:
            count = os.preadv(number, [view[done:]], offset + done)
            self._check_moved(count, offset + done)
            done += count

    def _read_past_cache(self, values: NDArray[np.uint8], offset: int) -> bool:
        """Read whole pages around the stretch into a buffer, and copy; False where the file system refuses that."""
        buffer = _buffer()
        done = 0
        try:
            with self._opened(os.O_DIRECT) as number:
                while done < values.size:
                    before = (offset + done) % ALIGN_BYTES
                    pages = min(round_up(before + values.size - done), buffer.size)
                    first = offset + done - before
                    count = os.preadv(number, [buffer[:pages].data], first) - before
                    self._check_moved(count, offset + done)
                    count = min(count, values.size - done)
                    values[done : done + count] = buffer[before : before + count]
                    done += count
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def _check_moved(self, count: int, offset: int) -> None:
        if count <= 0:
            msg = f"{self.path} ended at byte {offset} while it was read; it is being changed, or damaged"
            raise StoreError(msg)


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    """Return what tells a file from another one, and from itself when it has been written to."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _in_cache(number: int, offset: int) -> bool:
    """Whether the page cache has the first byte, so that it probably has what follows."""
    try:
        return os.preadv(number, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # it has not, or the file system cannot tell
        return False


def _buffer() -> NDArray[np.uint8]:
    """Return this thread's buffer; it dies with the thread."""
    found: NDArray[np.uint8] | None = getattr(_BUFFERS, "pages", None)
    if found is None:
        pages = map_pages(_BUFFER_BYTES + ALIGN_BYTES)
        found = _BUFFERS.pages = np.frombuffer(pages, np.uint8)
    return found
