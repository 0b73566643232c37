"""Which parts of a file are free: best fit, coalescing, growing at the end."""

from __future__ import annotations

from bisect import bisect_left

from megatrain_nb.store.base import round_up

KEEP_BYTES = 64 << 20
"""Free space that is not worth giving back: it is needed again soon."""


class Extents:
    """Allocate ranges of a file in units of 4096 bytes; does no I/O itself.

    Parameters
    ----------
    max_bytes
        The file never grows beyond this; None for no limit.

    Notes
    -----
    Not thread-safe: the owner locks. Linear in the number of holes, which copy on write
    of equal tiles keeps to a handful, and of packed ones to about as many as tiles.
    """

    used_bytes: int
    """Bytes allocated, in whole units."""
    end_bytes: int
    """End of the last allocated range: the file needs to be no longer than this."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.end_bytes = 0
        # Holes below end_bytes: sorted, disjoint, never touching each other or the end.
        self._holes: list[tuple[int, int]] = []

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` free bytes, or None if they do not fit.

        Examples
        --------
        >>> extents = Extents(max_bytes=3 * 4096)
        >>> extents.allocate(4096), extents.allocate(8192), extents.allocate(1)
        (0, 4096, None)
        >>> extents.free(0, 4096)
        >>> extents.allocate(1)
        0
        """
        size = round_up(max(nbytes, 1))
        fitting = [hole for hole in self._holes if hole[1] >= size]
        if fitting:
            offset, _ = min(fitting, key=lambda hole: hole[1])
        elif self.max_bytes is None or self.end_bytes + size <= self.max_bytes:
            offset = self.end_bytes
        else:
            return None
        self._take(offset, size)
        return offset

    def allocate_parts(self, nbytes: int) -> tuple[tuple[int, int], ...] | None:
        """Return (offset, length) of free ranges, `nbytes` in whole units together, or None.

        One range where there is one; the end of the file, as long as at most a fifth of
        it and `KEEP_BYTES` are holes; else the largest holes. So lengths that change
        from version to version neither fail for want of one range nor let the file grow
        without end.

        Examples
        --------
        >>> extents = Extents(max_bytes=4 * 4096)
        >>> first, kept, last = (extents.allocate(4096) for _ in range(3))
        >>> extents.free(first, 4096)
        >>> extents.allocate_parts(8192)
        ((0, 4096), (12288, 4096))
        """
        size = round_up(max(nbytes, 1))
        whole = size <= self.largest_free_bytes or self._may_grow(size)
        offset = self.allocate(size) if whole else None
        if offset is not None:
            return ((offset, size),)
        parts, left = list[tuple[int, int]](), size
        for hole_offset, hole in sorted(self._holes, key=lambda hole: -hole[1]):
            part = min(hole, left)
            if part:
                parts.append((hole_offset, part))
            left -= part
        limit = self.max_bytes
        if left and limit is not None and self.end_bytes + left > limit:
            return None
        if left:
            parts.append((self.end_bytes, left))
        for start, length in parts:
            self._take(start, length)
        return tuple(parts)

    def _may_grow(self, size: int) -> bool:
        end = self.end_bytes + size
        allowed = self.used_bytes + size
        return end <= allowed + allowed // 4 + KEEP_BYTES

    def _take(self, offset: int, size: int) -> None:
        """Allocate the beginning of a hole, or of what is behind the end."""
        at = bisect_left(self._holes, (offset, 0))
        if offset == self.end_bytes:
            self.end_bytes += size
        elif self._holes[at][1] == size:
            del self._holes[at]
        else:
            self._holes[at] = (offset + size, self._holes[at][1] - size)
        self.used_bytes += size

    def free(self, offset: int, nbytes: int) -> None:
        """Give a range back; what is not allocated is an error.

        Raises
        ------
        ValueError
            Part of the range is already free, or beyond the end.
        """
        size = round_up(max(nbytes, 1))
        at = bisect_left(self._holes, (offset, 0))
        before = self._holes[at - 1] if at else (0, 0)
        after = self._holes[at] if at < len(self._holes) else (self.end_bytes, 0)
        if offset < sum(before) or offset + size > after[0] or offset % round_up(1):
            msg = f"bytes {offset} to {offset + size} are not allocated: freed twice?"
            raise ValueError(msg)
        self.used_bytes -= size
        first, last, start, end = at, at, offset, offset + size
        if before[1] and sum(before) == start:
            first, start = at - 1, before[0]
        if after[1] and after[0] == end:
            last, end = at + 1, sum(after)
        if end == self.end_bytes:
            self._holes[first:last] = []
            self.end_bytes = start
        else:
            self._holes[first:last] = [(start, end - start)]

    def reserve(self, ranges: list[tuple[int, int]]) -> None:
        """Mark (offset, nbytes) ranges of an existing file as allocated.

        Raises
        ------
        ValueError
            They overlap, or this is not a fresh object.
        """
        if self.end_bytes:
            msg = "reserve() is for a fresh Extents"
            raise ValueError(msg)
        for offset, nbytes in sorted(ranges):
            size = round_up(max(nbytes, 1))
            if offset < self.end_bytes or offset % round_up(1):
                msg = f"bytes {offset} to {offset + size} overlap another range"
                raise ValueError(msg)
            if offset > self.end_bytes:
                self._holes.append((self.end_bytes, offset - self.end_bytes))
            self.end_bytes = offset + size
            self.used_bytes += size

    @property
    def largest_free_bytes(self) -> int:
        """Largest range that `allocate` could give now without growing the file."""
        return max((size for _, size in self._holes), default=0)
