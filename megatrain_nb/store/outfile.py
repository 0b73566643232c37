"""Files that are written once, from front to back, past the page cache, while their next bytes are being made.

A file that goes through the page cache costs a copy and, once the cache is full of it, the RAM that others have; and most
of it goes to the disk at the end, when everybody waits. Here what was made is on its way to the disk at once.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.store.base import ALIGN_BYTES, round_up, wait

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    Piece = NDArray[np.uint8]

_TIMEOUT_S = 120.0
_MAX_STALLS = 100


class FileWriter:
    """Writes one file after the other; a context manager, whose end waits for its threads.

    Parameters
    ----------
    pieces
        Page-aligned memory, two pieces or more of one length, whole pages: one is filled while the others are written.
    direct
        Bypass the page cache; False where the file system refuses it (`takes_direct`): each write is synchronous then.
    """

    def __init__(self, pieces: Sequence[Piece], *, direct: bool) -> None:
        self._direct = direct
        self._free = deque(pieces)
        self._writing: deque[tuple[Future[None], Piece]] = deque()
        self._threads = ThreadPoolExecutor(max(len(pieces) - 1, 1), "megatrain-save")
        self._fd = -1
        self._path: Path | None = None
        self._offset = 0  # of the piece that is being filled
        self._filled = 0

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def opened(self, path: Path) -> Iterator[None]:
        """Let `write` go to a new file; when this ends without an error the medium has all of it.

        Raises
        ------
        OSError
            It exists, the disk is full, or it failed.
        """
        past_cache = os.O_DIRECT if self._direct else os.O_DSYNC
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | past_cache
        self._path, self._offset, self._filled = path, 0, 0
        self._fd = os.open(path, flags, 0o666)
        try:
            yield
            num_bytes = self._offset + self._filled
            self._send()
            while self._writing:
                self._land()
            os.ftruncate(self._fd, num_bytes)  # the last piece went in whole pages
            os.fsync(self._fd)
        finally:
            for (
                write,
                piece,
            ) in self._writing:  # until it has ended, its piece is not ours
                write.cancel()
                with suppress(Exception):
                    wait(write, what=f"writing {path}", timeout_s=_TIMEOUT_S)
                self._free.append(piece)
            self._writing.clear()
            os.close(self._fd)
            self._fd = -1

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; they are copied.

        Raises
        ------
        OSError
            An earlier piece could not be written.
        """
        values = np.frombuffer(data, np.uint8)
        done = 0
        while done < values.size:
            while not self._free:
                self._land()
            piece = self._free[0]
            count = min(values.size - done, piece.size - self._filled)
            piece[self._filled : self._filled + count] = values[done : done + count]
            self._filled += count
            done += count
            if self._filled == piece.size:
                self._send()

    def _send(self) -> None:
        """Let a thread write what the piece in hand holds."""
        if not self._filled:
            return
        piece = self._free.popleft()
        end = self._filled
        if self._direct:
            end = round_up(end)
            piece[self._filled : end] = 0
        write = self._threads.submit(
            _write, self._fd, piece[:end], self._offset, direct=self._direct
        )
        self._writing.append((write, piece))
        self._offset += self._filled
        self._filled = 0

    def _land(self) -> None:
        """Wait for the oldest write, and take its piece back."""
        write, piece = self._writing[0]
        wait(write, what=f"writing {self._path}", timeout_s=_TIMEOUT_S)
        self._writing.popleft()
        self._free.append(piece)


def _write(fd: int, data: Piece, offset: int, *, direct: bool) -> None:
    view = data.data
    done = stalls = 0
    while done < len(view):
        count = os.pwrite(fd, view[done:], offset + done)
        if direct:  # after a short write it goes on where a page begins
            count -= count % ALIGN_BYTES
        done += count
        stalls = 0 if count else stalls + 1
        if stalls > _MAX_STALLS:
            raise OSError(errno.EIO, f"nothing was written in {stalls} attempts")
    if not direct:
        os.posix_fadvise(fd, offset, len(view), os.POSIX_FADV_DONTNEED)
