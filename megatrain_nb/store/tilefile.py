"""One preallocated file, read and written past the page cache."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatrain_nb.errors import StoreError
from megatrain_nb.store.base import ALIGN_BYTES, round_up
from megatrain_nb.store.host import map_pages
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

# Large, for the sake of the GIL: while another thread runs Python, every return from the
# kernel waits up to 5 ms (sys.getswitchinterval) to get it back. Measured with 16 MiB
# tiles, four in flight, on a virtual disk, GB/s written and read: beside a busy Python
# thread 0.6 0.4 with requests of 1 MiB, 1.5 1.3 with 4 and 8, 1.9 1.4 with 16; alone
# 4.4 2.3 with any of them.
_REQUEST_BYTES = 32 << 20
_BOUNCE_BYTES = 1 << 20
_MAX_STALLS = 100  # calls in a row that move nothing, before it is an error
_GROW_MIN_BYTES, _GROW_MAX_BYTES = 1 << 20, 64 << 20


class TileFile:
    """Whole ranges in and out of one file.

    Parameters
    ----------
    direct
        O_DIRECT: the device copies from and to the arrays, and the page cache stays
        empty. Otherwise writes are synchronous and the cache is dropped after each
        transfer, so that it does not hold RAM that is planned for something else.
    create
        Make the file; it must not exist. Otherwise it must.
    read_only
        Nothing is written, and `shrink` leaves it as it is.

    Notes
    -----
    `read` and `write` may be called from several threads on disjoint ranges; `grow` and
    `shrink` from one at a time.
    """

    size_bytes: int
    """Bytes of the file, all of them backed by the disk."""

    def __init__(
        self, path: Path, *, direct: bool, create: bool, read_only: bool = False
    ) -> None:
        self.path = path
        self.direct = direct
        self._read_only = read_only
        flags = os.O_RDONLY if read_only else os.O_RDWR
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        flags |= os.O_DIRECT if direct else os.O_DSYNC
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise StoreError(self._why_not_open(error)) from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            self.close()
            raise StoreError(self._why_not_ours(status))
        self.size_bytes = status.st_size
        self._bounce = threading.local()

    def read(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` from `offset`, which is a multiple of 4096."""
        view = out.reshape(-1).data
        body = self._direct_bytes(out)
        self._transfer(os.preadv, "read", view[:body], offset)
        for start in range(body, len(view), _BOUNCE_BYTES):
            part = view[start : start + _BOUNCE_BYTES]
            bounce = self._bounce_pages()
            pages = bounce[: round_up(len(part))]
            self._transfer(os.preadv, "read", pages, offset + start)
            part[:] = bounce[: len(part)]
        self._drop_cache(offset, len(view))

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Write `data` at `offset`, which is a multiple of 4096."""
        view = data.reshape(-1).data
        body = self._direct_bytes(data)
        self._transfer(os.pwritev, "write", view[:body], offset)
        for start in range(body, len(view), _BOUNCE_BYTES):
            part = view[start : start + _BOUNCE_BYTES]
            bounce = self._bounce_pages()
            bounce[: len(part)] = part
            pages = bounce[: round_up(len(part))]
            self._transfer(os.pwritev, "write", pages, offset + start)
        self._drop_cache(offset, len(view))

    def grow(self, size_bytes: int, max_bytes: int | None) -> None:
        """Make the file at least `size_bytes` long, backed by the disk.

        Raises
        ------
        StoreError
            The disk is full; the file is as long as before.
        """
        if size_bytes <= self.size_bytes:
            return
        # In steps, so that a training run does not ask the file system for every tile.
        step = min(max(self.size_bytes // 16, _GROW_MIN_BYTES), _GROW_MAX_BYTES)
        ample = self.size_bytes + max(step, size_bytes - self.size_bytes)
        if max_bytes is not None:
            ample = max(size_bytes, min(ample, max_bytes))
        try:
            self._allocate(ample)
        except OSError:
            try:
                self._allocate(size_bytes)
            except OSError as error:
                raise StoreError(self._why_not_grow(size_bytes, error)) from error

    def shrink(self, size_bytes: int) -> None:
        """Give the end of the file back to the disk."""
        if size_bytes < self.size_bytes and not self._read_only:
            with self._errors("ftruncate"):
                os.ftruncate(self._fd, size_bytes)
            self.size_bytes = size_bytes

    def sync(self) -> None:
        """Wait until the medium has everything.

        Raises
        ------
        StoreError
            The medium could not take it.
        """
        with self._errors("fsync"):
            os.fsync(self._fd)

    @property
    def free_bytes(self) -> int:
        """Bytes left on the disk of the file, even if somebody deleted its name."""
        return free_bytes(self._fd)

    def close(self) -> None:
        """Close the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def _errors(self, call: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            msg = f"{call} of {self.path} failed: {error.strerror}"
            raise StoreError(msg) from error

    def _direct_bytes(self, array: NDArray[np.uint8]) -> int:
        """How much of `array` the kernel can move without a copy through a bounce."""
        if not self.direct:
            return array.nbytes
        if array.ctypes.data % ALIGN_BYTES:
            return 0
        return array.nbytes - array.nbytes % ALIGN_BYTES

    def _bounce_pages(self) -> memoryview:
        """Return this thread's small aligned buffer; it dies with the thread."""
        pages: memoryview | None = getattr(self._bounce, "pages", None)
        if pages is None:
            pages = self._bounce.pages = memoryview(map_pages(_BOUNCE_BYTES))
        return pages

    def _transfer(
        self,
        call: Callable[[int, list[memoryview], int], int],
        verb: str,
        view: memoryview,
        offset: int,
    ) -> None:
        """Move all of `view`; the kernel may do less than asked at any time."""
        done = stalls = 0
        while done < len(view):
            part = view[done : done + _REQUEST_BYTES]
            try:
                count = call(self._fd, [part], offset + done)
            except InterruptedError:
                count = 0
            except OSError as error:
                raise self._failed(verb, offset + done, len(part), error) from error
            # After a short transfer a direct one must go on at an aligned offset.
            if self.direct:
                count -= count % ALIGN_BYTES
            done += count
            stalls = 0 if count else stalls + 1
            if stalls > _MAX_STALLS:
                stuck = OSError(errno.EIO, f"nothing moved in {stalls} attempts")
                raise self._failed(verb, offset + done, len(part), stuck)

    def _failed(
        self, verb: str, offset: int, nbytes: int, error: OSError
    ) -> StoreError:
        code = errno.errorcode.get(error.errno or 0, "?")
        msg = (
            f"{verb} of {nbytes} bytes at offset {offset} of {self.path} failed: "
            f"{error.strerror} ({code})"
        )
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            msg += f"; {self._free_text()}"
        elif error.errno == errno.EINVAL and self.direct:
            msg += "; the file system may not support O_DIRECT: use direct=False"
        return StoreError(msg)

    def _drop_cache(self, offset: int, nbytes: int) -> None:
        if not self.direct:
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _allocate(self, size_bytes: int) -> None:
        grown = size_bytes - self.size_bytes
        try:
            os.posix_fallocate(self._fd, self.size_bytes, grown)
        except OSError as error:
            os.ftruncate(self._fd, self.size_bytes)  # a part may have been granted
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:
                raise
            # This file system cannot reserve. Look before the write at least.
            if self.free_bytes < grown:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            os.ftruncate(self._fd, size_bytes)
        self.size_bytes = size_bytes

    def _free_text(self) -> str:
        free = format_bytes(self.free_bytes)
        return f"the disk has {free} free: free some space or use another directory"

    def _why_not_grow(self, size_bytes: int, error: OSError) -> str:
        grown = format_bytes(size_bytes - self.size_bytes)
        return (
            f"{self.path} cannot grow by {grown} from {format_bytes(self.size_bytes)}: "
            f"{error.strerror}; {self._free_text()}"
        )

    def _why_not_ours(self, status: os.stat_result) -> str:
        if stat.S_ISREG(status.st_mode):
            return (
                f"{self.path} has a second name elsewhere (a hard link), and what is written here would change it there; "
                f"give it a copy of its own: cp {self.path.name} new && mv new {self.path.name}"
            )
        return f"{self.path} is not a regular file; delete it"

    def _why_not_open(self, error: OSError) -> str:
        if error.errno == errno.EEXIST:
            why = (
                "it exists, no checkpoint needs it, and there is no lock that would say that a session left it here; "
                "delete it, or choose another directory"
            )
        elif error.errno == errno.EINVAL and self.direct:
            why = "the file system does not support O_DIRECT; use direct=False"
        elif error.errno == errno.ELOOP:
            why = "it is a link, which may lead out of the directory; put the file itself there"
        else:
            why = f"{error.strerror}; it has to be there, to read and to write"
        return f"cannot open {self.path}: {why}"


def free_bytes(where: Path | int) -> int:
    """Return what an ordinary user can still write on the disk of a path or open file."""
    stat = os.statvfs(where)
    return stat.f_bavail * stat.f_frsize
