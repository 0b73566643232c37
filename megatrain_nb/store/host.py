"""Page-aligned host memory with a hard budget.

Slabs are private anonymous mappings, so their addresses suit direct I/O, their sizes are
exact, and what is unmapped goes back to the kernel at once (``malloc`` keeps it).
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatrain_nb.errors import ArgumentError, BudgetError, SessionError
from megatrain_nb.store.base import round_up
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from numpy.typing import DTypeLike, NDArray

    Changing = Callable[[int], AbstractContextManager[None]]

_HUGE_BYTES = 2 << 20
_TAKEN, _FREE, _GONE = "taken", "given back", "unmapped"


def map_pages(nbytes: int) -> mmap.mmap:
    """Return `nbytes` of zeroed, page-aligned memory that direct I/O may target.

    Notes
    -----
    Private, not shared, because MADV_DONTNEED must give the pages back. A fork during a
    direct read into private pages can send the data to the wrong copy (open(2), NOTES),
    and notebooks fork for every ``!command``: hence MADV_DONTFORK. A forked child must
    not touch slabs. Huge pages, because a direct transfer of contiguous memory is split
    into far fewer requests: 16 MiB tiles, four in flight, on a virtual disk, wrote at
    4.5 GB/s and read at 2.3 instead of 1.9 and 0.9.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    if nbytes >= _HUGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class PageLock(Protocol):
    """Keeps mappings in RAM, so that a device can copy from them and to them by itself."""

    def register(self, address: int, nbytes: int) -> bool:
        """Lock a mapping; False where the system refuses."""

    def unregister(self, address: int) -> None:
        """Undo it."""


class Slab:
    """A piece of page-aligned memory taken from a `HostPool`.

    Attributes
    ----------
    nbytes
        Length in bytes, rounded up to whole pages.
    what
        What it was taken for; the pool accounts by this name.
    """

    __slots__ = ("_array", "_lock", "_pages", "_state", "nbytes", "what")

    def __init__(self, nbytes: int, what: str) -> None:
        self.nbytes = nbytes
        self.what = what
        self._state = _TAKEN
        self._pages: mmap.mmap | None = map_pages(nbytes)
        self._array: NDArray[np.uint8] = np.frombuffer(self._pages, dtype=np.uint8)
        self._lock: PageLock | None = None

    def __repr__(self) -> str:
        return f"<Slab {self.what!r} {format_bytes(self.nbytes)} {self._state}>"

    @property
    def pinned(self) -> bool:
        """Whether it is page-locked."""
        return self._lock is not None

    def _pin(self, lock: PageLock) -> bool:
        if lock.register(self._array.ctypes.data, self.nbytes):
            self._lock = lock
        return self.pinned

    @property
    def array(self) -> NDArray[np.uint8]:
        """All bytes of the slab."""
        if self._state is not _TAKEN:
            msg = f"use of {self!r}: only a slab that is taken may be used"
            raise RuntimeError(msg)
        return self._array

    def view(self, dtype: DTypeLike, offset_bytes: int, count: int) -> NDArray[Any]:
        """Return `count` items of `dtype`, starting at `offset_bytes`."""
        end = offset_bytes + count * np.dtype(dtype).itemsize
        if not 0 <= offset_bytes <= end <= self.nbytes:
            msg = (
                f"bytes {offset_bytes} to {end} are outside {self!r} ({self.nbytes} B)"
            )
            raise ArgumentError(msg)
        return self.array[offset_bytes:end].view(dtype)

    def _unmap(self, *, discard: bool) -> None:
        """Let go of the memory; `discard` returns it even while views are alive."""
        if self._lock is not None:  # before the mapping goes
            self._lock.unregister(self._array.ctypes.data)
            self._lock = None
        pages, self._pages, self._state = self._pages, None, _GONE
        self._array = np.empty(0, np.uint8)
        if pages is None:
            return
        try:
            pages.close()
        except BufferError:
            # Somebody still has a view. The address range lives as long as the view;
            # the pages behind it need not.
            if discard:
                pages.madvise(mmap.MADV_DONTNEED)


class HostPool:
    """Hands out slabs; mapped memory never exceeds the limit, not even for a moment.

    Parameters
    ----------
    limit_bytes
        Budget for all slabs, in use and kept for reuse.
    poison
        Fill slabs with 0xFF (NaN as float32) when they come back, so that use after
        give shows. For tests: it costs a pass over the memory.
    page_lock
        Page-locks slabs when they are first taken for one of ``locked``; None for no page-locking. Where that
        fails they are used as they are.
    locked
        What slabs are taken for that a device copies from and to.
    changing
        Entered with the mapped bytes while they change: who measures the process can tell what of it is the pool's.

    Notes
    -----
    Every method may be called from any thread. Fresh slabs are zero, reused ones hold
    what was there before.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        poison: bool = False,
        page_lock: PageLock | None = None,
        locked: frozenset[str] = frozenset(),
        changing: Changing = lambda _: nullcontext(),
    ) -> None:
        self._changing = changing
        self._page_lock = page_lock
        self._locked = locked
        self._pinned_bytes = 0
        self._limit_bytes = limit_bytes
        self._poison = poison
        self._lock = threading.Lock()
        self._taken: set[Slab] = set()
        self._free: dict[int, list[Slab]] = {}
        self._in_use_bytes = 0
        self._free_bytes = 0
        self._aside_bytes = 0
        self._peak_bytes = 0
        self._closed = False

    @property
    def limit_bytes(self) -> int:
        """The budget; lowering it unmaps free slabs first."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        with self._lock:
            if limit_bytes < self._in_use_bytes + self._aside_bytes:
                msg = (
                    f"cannot lower the RAM limit to {format_bytes(limit_bytes)}: "
                    f"{self._usage()}. Free some of it first, or choose a higher limit"
                )
                raise BudgetError(msg)
            self._unmap_free(
                self._in_use_bytes + self._free_bytes + self._aside_bytes - limit_bytes
            )
            self._limit_bytes = limit_bytes

    @property
    def in_use_bytes(self) -> int:
        """Bytes of slabs that are taken."""
        return self._in_use_bytes

    @property
    def aside_bytes(self) -> int:
        """Bytes that `set_aside` took."""
        return self._aside_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all slabs, taken or kept for reuse."""
        with self._lock:
            return self._in_use_bytes + self._free_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes ever mapped."""
        return self._peak_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of slabs that are page-locked."""
        return self._pinned_bytes

    def in_use_by_what(self) -> dict[str, int]:
        """Return the bytes taken, by what they were taken for, largest first."""
        with self._lock:
            return self._by_what()

    def take(self, nbytes: int, *, what: str) -> Slab:
        """Return a slab of at least `nbytes`, rounded up to whole pages.

        Raises
        ------
        BudgetError
            It does not fit the limit; nothing was taken.
        """
        with self._lock:
            slab = self._take(nbytes, what)
            if slab is not None:
                return slab
            left = self._limit_bytes - self._aside_bytes
            usage, free = self._usage(), left - self._in_use_bytes
        msg = (
            f"{what} needs {format_bytes(round_up(nbytes))} of RAM, {format_bytes(free)} "
            f"are left: {usage}, limit {format_bytes(self._limit_bytes)}. Raise "
            "max_ram_gb, or use a smaller model, batch or number of resident layers"
        )
        raise BudgetError(msg)

    def try_take(self, nbytes: int, *, what: str) -> Slab | None:
        """Like `take`, but return None where it does not fit."""
        with self._lock:
            return self._take(nbytes, what)

    def set_aside(self, nbytes: int) -> bool:
        """Leave so much of the budget to memory that is not the pool's; False if slabs in use do not allow it."""
        with self._lock:
            taken = self._in_use_bytes + self._aside_bytes + nbytes
            if taken > self._limit_bytes:
                return False
            self._unmap_free(taken + self._free_bytes - self._limit_bytes)
            self._aside_bytes += nbytes
            return True

    def take_back(self, nbytes: int) -> None:
        """Have so much again of what was set aside."""
        with self._lock:
            self._aside_bytes -= nbytes

    def give(self, slab: Slab) -> None:
        """Take a slab back; it stays mapped for the next `take` of its size.

        Raises
        ------
        RuntimeError
            The slab was given back before, or belongs to another pool.
        """
        with self._lock:
            if slab not in self._taken:
                if self._closed and slab._state is _GONE:
                    return  # close() took it already
                msg = f"{slab!r} is not one this pool has handed out: given back twice?"
                raise RuntimeError(msg)
            if self._poison:
                slab.array.fill(0xFF)
            self._taken.remove(slab)
            slab._state = _FREE
            self._in_use_bytes -= slab.nbytes
            self._free_bytes += slab.nbytes
            self._free.setdefault(slab.nbytes, []).append(slab)

    def trim(self) -> None:
        """Unmap all slabs that are not taken."""
        with self._lock:
            self._unmap_free(self._free_bytes)

    def close(self) -> None:
        """Unmap everything; idempotent.

        Notes
        -----
        A slab that is still taken and viewed keeps its content until the last view is
        gone (a model that is still bound to it must not turn to zeros silently).
        """
        with self._lock:
            self._closed = True
            self._unmap_free(self._free_bytes)
            for slab in self._taken:
                self._unmap(slab, discard=False)
            self._taken.clear()
            self._in_use_bytes = 0

    def _take(self, nbytes: int, what: str) -> Slab | None:
        if self._closed:
            msg = f"no memory for {what}: the pool is closed"
            raise SessionError(msg)
        size = round_up(max(nbytes, 1))
        pin = self._page_lock is not None and what in self._locked
        reusable = self._free.get(size)
        if reusable:
            # The last one that is page-locked, or is not, as it is wanted; else the last one.
            suits = (
                i for i in reversed(range(len(reusable))) if reusable[i].pinned == pin
            )
            slab = reusable.pop(next(suits, -1))
            self._free_bytes -= size
            slab.what, slab._state = what, _TAKEN
        else:
            limit = self._limit_bytes - self._aside_bytes
            if self._in_use_bytes + size > limit:
                return None
            self._unmap_free(self._in_use_bytes + self._free_bytes + size - limit)
            slab = self._map(size, what)
        if pin and not slab.pinned:
            assert self._page_lock is not None
            self._pinned_bytes += size * slab._pin(self._page_lock)
        self._taken.add(slab)
        self._in_use_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._in_use_bytes + self._free_bytes)
        return slab

    def _map(self, size: int, what: str) -> Slab:
        try:
            with self._changing(self._in_use_bytes + self._free_bytes):
                return Slab(size, what)
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or "out of memory"
            msg = (
                f"the system refused {format_bytes(size)} of memory for {what} "
                f"({why}): {self._usage()}. Lower max_ram_gb to what this "
                "machine (or its container) can give"
            )
            raise BudgetError(msg) from error

    def _unmap_free(self, nbytes: int) -> None:
        """Unmap at least `nbytes` of free slabs, as few slabs as possible."""
        while nbytes > 0 and self._free_bytes:
            sizes = [size for size, slabs in self._free.items() if slabs]
            enough = [size for size in sizes if size >= nbytes]
            size = min(enough) if enough else max(sizes)
            with self._changing(self._in_use_bytes + self._free_bytes):
                self._unmap(self._free[size].pop(), discard=True)
            self._free_bytes -= size
            nbytes -= size

    def _unmap(self, slab: Slab, *, discard: bool) -> None:
        self._pinned_bytes -= slab.nbytes * slab.pinned
        slab._unmap(discard=discard)

    def _by_what(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for slab in self._taken:
            counts[slab.what] += slab.nbytes
        return dict(counts.most_common())

    def _usage(self) -> str:
        parts = [f"{what} {format_bytes(n)}" for what, n in self._by_what().items()]
        detail = f" ({', '.join(parts)})" if parts else ""
        aside = self._aside_bytes
        kept = f", {format_bytes(aside)} for kept activations" if aside else ""
        return f"{format_bytes(self._in_use_bytes)} in use{detail}{kept}"
