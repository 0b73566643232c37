"""Who holds which part of the data file, and room for new tiles."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from megatrain_nb.errors import BudgetError, StoreError
from megatrain_nb.store.base import round_up
from megatrain_nb.store.extents import KEEP_BYTES, Extents
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatrain_nb.store.manifest import Parts, Tile
    from megatrain_nb.store.tilefile import TileFile

_TIMEOUT_S = 30.0


class Space:
    """Count the holds on each extent; the last one to go frees it.

    Attributes
    ----------
    changed
        The lock of the store: hold it in every call here.
    num_transfers
        Transfers that hold an extent now; when one ends, an old version may go.
    peak_bytes
        Largest size the file has had.
    """

    def __init__(
        self, file: TileFile, max_bytes: int | None, tiles: Iterable[Tile]
    ) -> None:
        self.changed = threading.Condition()
        self.num_transfers = 0
        self._file = file
        self._max_bytes = max_bytes
        self._extents = Extents(max_bytes)
        self._holds: Counter[int] = Counter()
        self._take_over(list(tiles))
        self.peak_bytes = file.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that somebody holds."""
        return self._extents.used_bytes

    def allocate(self, key: str, nbytes: int) -> Parts:
        """Return ranges of free space, held once.

        Notes
        -----
        Waits where space is about to come free: copy on write needs one spare extent,
        not one for each put in flight. Only running transfers are waited for, so a
        thread never waits for work that is queued behind it.

        Raises
        ------
        BudgetError
            No room within the budget.
        StoreError
            The disk is full.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            parts = self._extents.allocate_parts(nbytes)
            if parts is not None:
                try:
                    self._file.grow(self._extents.end_bytes, self._max_bytes)
                    break
                except StoreError:
                    self._free(parts)
                    if not self._wait_for_a_transfer(deadline):
                        raise
            elif not self._wait_for_a_transfer(deadline):
                raise BudgetError(self._why_no_room(key, nbytes))
        self.peak_bytes = max(self.peak_bytes, self._file.size_bytes)
        self._holds[parts[0][0]] += 1
        return parts

    def hold(self, parts: Parts) -> None:
        """Keep the bytes of a tile that is held already."""
        self._holds[parts[0][0]] += 1

    def drop(self, parts: Parts) -> None:
        """Give up one hold."""
        first = parts[0][0]
        self._holds[first] -= 1
        if not self._holds[first]:
            del self._holds[first]
            self._free(parts)
        self.changed.notify_all()

    def cut(self, parts: Parts, nbytes: int) -> Parts:
        """Free what is behind the first `nbytes` of ranges that only the caller holds."""
        kept, left = list[tuple[int, int]](), round_up(max(nbytes, 1))
        for offset, length in parts:
            used = min(length, left)
            left -= used
            if used:
                kept.append((offset, used))
            if used < length:
                self._extents.free(offset + used, length - used)
        self.changed.notify_all()
        return tuple(kept)

    def give_back(self, *, all_of_it: bool = False) -> None:
        """Return a large free end to the disk; a small one is needed again soon."""
        end_bytes = self._extents.end_bytes
        spare = 0 if all_of_it else end_bytes // 4 + KEEP_BYTES
        if self._file.size_bytes > end_bytes + spare:
            self._file.shrink(end_bytes)

    def _free(self, parts: Parts) -> None:
        for offset, length in parts:
            self._extents.free(offset, length)

    def _wait_for_a_transfer(self, deadline: float) -> bool:
        left_s = deadline - time.monotonic()
        return self.num_transfers > 0 and left_s > 0 and self.changed.wait(left_s)

    def _take_over(self, tiles: list[Tile]) -> None:
        """Hold the tiles of all pinned manifests; the rest of the file is free space."""
        path = self._file.path
        try:
            # Tiles share all of their ranges or none: a range of two different tiles overlaps.
            ranges = [
                part for parts in {tile.parts for tile in tiles} for part in parts
            ]
            self._extents.reserve(ranges)
        except ValueError as error:
            msg = f"the checkpoints do not fit {path}: {error}"
            raise StoreError(msg) from error
        end_bytes, size_bytes = self._extents.end_bytes, self._file.size_bytes
        if end_bytes > size_bytes:
            msg = f"{path} has {size_bytes} bytes, its checkpoints name {end_bytes}"
            raise StoreError(msg)
        if self._max_bytes is not None and end_bytes > self._max_bytes:
            msg = (
                f"{path} holds tiles up to {format_bytes(end_bytes)}, the budget is "
                f"{format_bytes(self._max_bytes)}; raise max_disk_gb"
            )
            raise BudgetError(msg)
        self._holds.update(tile.offset for tile in tiles)
        self._file.shrink(end_bytes)

    def _why_no_room(self, key: str, nbytes: int) -> str:
        limit = self._max_bytes or 0
        return (
            f"tile {key!r} needs {format_bytes(round_up(nbytes))} on disk; of the budget "
            f"of {format_bytes(limit)} {format_bytes(self.used_bytes)} are used, "
            f"{format_bytes(limit - self.used_bytes)} are left; the disk itself has "
            f"{format_bytes(self._file.free_bytes)} free. Raise max_disk_gb; a "
            "replaced tile is freed only after its successor is written"
        )
