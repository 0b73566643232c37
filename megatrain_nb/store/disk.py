"""Tiles in one large file on NVMe, copy on write."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from megatrain_nb.errors import ArgumentError, BudgetError, ChecksumError, StoreError
from megatrain_nb.store.base import IoRecord, round_up
from megatrain_nb.store.extents import Extents
from megatrain_nb.store.lanes import Lanes
from megatrain_nb.store.manifest import (
    Manifest,
    Tile,
    delete_manifest,
    read_manifest,
    write_manifest,
)
from megatrain_nb.store.tilefile import TileFile, free_bytes
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

DATA_NAME = "tiles.bin"
_CLOSE_TIMEOUT_S = 30.0
_SPACE_TIMEOUT_S = 30.0
_KEEP_BYTES = 64 << 20


class DiskStore:
    """Keep tiles in one preallocated file; `megatrain_nb.store.base` is the contract.

    Parameters
    ----------
    directory
        An existing directory that this process owns (see `OwnerLock`).
    max_bytes
        Budget on disk. Copy on write needs room for one tile more than is stored.
    num_threads
        Transfers in flight.
    direct
        Bypass the page cache; False where the file system refuses (`check_directory`).
    on_io
        Called from an I/O thread after each transfer that succeeded.
    resume
        Go on with the file in `directory` and the tiles of this manifest; what the
        manifest does not name is free space.

    Notes
    -----
    A put goes to free space and then replaces the index entry. The bytes of the old
    version become free space when its last holder lets go: the index, gets that are
    reading it, and pinned manifests each hold it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int | None = None,
        num_threads: int = 4,
        direct: bool = True,
        on_io: Callable[[IoRecord], None] | None = None,
        resume: Manifest | None = None,
    ) -> None:
        self.directory = directory
        self.path = directory / DATA_NAME
        self.max_bytes = max_bytes
        self.read_bytes = 0
        self.written_bytes = 0
        self._on_io = on_io
        self._changed = threading.Condition()
        self._index: dict[str, Tile] = dict(resume.tiles) if resume else {}
        self._extents = Extents(max_bytes)
        self._holds: Counter[int] = Counter()
        self._pins: set[Manifest] = set()
        self._deleted: dict[str, int] = {}
        self._num_puts = 0  # submitted and not yet finished
        self._num_transfers = 0  # that hold an extent
        self._closing = self._closed = False
        self._generation = max((t.generation for t in self._index.values()), default=0)
        self._file = TileFile(self.path, direct=direct, create=resume is None)
        try:
            self._reserve_index()
        except BaseException:
            self._file.close()
            raise
        self._peak_bytes = self._file.size_bytes
        self._lanes = Lanes(num_threads, "megatrain-io")

    read_manifest = staticmethod(read_manifest)

    def __repr__(self) -> str:
        state = "closed" if self._closing else f"{len(self._index)} tiles"
        return f"<DiskStore {self.path} {state} {format_bytes(self.used_bytes)}>"

    def put(
        self, key: str, data: NDArray[np.uint8], *, codec: str = "raw"
    ) -> Future[None]:
        """Store the bytes of `data` under `key`; the old version stays until then.

        Raises
        ------
        BudgetError
            From the future: no room within `max_bytes`; the old version is in place.
        StoreError
            At the call: closed. From the future: the disk is full or failed; the old
            version is in place.
        """
        _check_array(data, key, writeable=False)
        with self._changed:
            self._check_open()
            self._generation += 1
            self._num_puts += 1
            work = partial(self._write, key, data, codec, self._generation)
            return self._lanes.submit(work, write=True)

    def get_into(self, key: str, out: NDArray[np.uint8]) -> Future[None]:
        """Fill `out` with the tile.

        Raises
        ------
        ChecksumError
            From the future: the bytes on disk are not the bytes that were put.
        StoreError
            At the call: closed, or no such tile. From the future: the disk failed, or
            the tile was deleted or changed its length before its turn came.
        """
        _check_array(out, key, writeable=True)
        with self._changed:
            self._check_open()
            _check_length(key, self._tile(key), out)
            return self._lanes.submit(partial(self._read, key, out), write=False)

    def delete(self, key: str) -> None:
        """Forget the tile; puts of it that are still queued are void."""
        with self._changed:
            self._check_open()
            self._drop(self._tile(key))
            del self._index[key]
            self._generation += 1
            if self._num_puts:
                self._deleted[key] = self._generation

    def __contains__(self, key: object) -> bool:
        with self._changed:
            self._check_open()
            return key in self._index

    def nbytes(self, key: str) -> int:
        """Return the length of the tile in bytes, as it was put."""
        with self._changed:
            self._check_open()
            return self._tile(key).nbytes

    def codec(self, key: str) -> str:
        """Return the name of the codec that the tile was put with."""
        with self._changed:
            self._check_open()
            return self._tile(key).codec

    def keys(self) -> list[str]:
        """Return the keys, sorted."""
        with self._changed:
            self._check_open()
            return sorted(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that hold tiles, old versions still held included."""
        return self._extents.used_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest size the file has had."""
        return self._peak_bytes

    def pin(self) -> Manifest:
        """Return the tiles of this moment and keep them on disk until `unpin`."""
        with self._changed:
            self._check_open()
            manifest = Manifest(dict(self._index))
            self._pins.add(manifest)
            for tile in manifest.tiles.values():
                self._holds[tile.offset] += 1
            return manifest

    def unpin(self, manifest: Manifest) -> None:
        """Let the tiles of a pinned manifest go where nothing else holds them."""
        with self._changed:
            self._check_open()
            if manifest not in self._pins:
                msg = "this manifest is not pinned (any more) in this store"
                raise StoreError(msg)
            self._pins.remove(manifest)
            for tile in manifest.tiles.values():
                self._drop(tile)
            # Give a large free end back to the disk; a small one is needed again soon.
            end_bytes = self._extents.end_bytes
            if self._file.size_bytes > end_bytes + end_bytes // 4 + _KEEP_BYTES:
                self._file.shrink(end_bytes)

    def flush(self, manifest: Manifest | None = None) -> None:
        """Make `manifest`, or the present tiles, what `read_manifest` finds.

        Notes
        -----
        Covers puts whose futures are done. Only a manifest that stays pinned stays
        true: later puts may overwrite the space of tiles that nothing holds.
        """
        held = manifest or self.pin()
        try:
            with self._changed:
                self._check_open()
                if held not in self._pins:
                    msg = "flush() of a manifest that is not pinned: pin() it first"
                    raise StoreError(msg)
            self._file.sync()
            write_manifest(self.directory, held)
        finally:
            if manifest is None:
                self.unpin(held)

    def close(self, *, delete: bool = True) -> None:
        """Wait for running transfers, join the threads, close the file; idempotent.

        Parameters
        ----------
        delete
            Cancel what is queued and delete the files. Otherwise queued transfers are
            done and the files stay; `flush` first if they are to be resumed.

        Raises
        ------
        StoreError
            Transfers are still running after 30 s. The store takes no more calls, and
            its threads and file stay: closing a file under a transfer is not safe.
        """
        with self._changed:
            self._closing = True
            if self._closed:
                return
        if delete:
            self._lanes.cancel_queued()
        left = self._lanes.drain(_CLOSE_TIMEOUT_S)
        if left:
            msg = (
                f"{left} transfers of {self.path} have not finished in "
                f"{_CLOSE_TIMEOUT_S:g} s; the disk is stalled. Call close() again later"
            )
            raise StoreError(msg)
        self._lanes.shutdown()
        self._file.close()
        if delete:
            self.path.unlink(missing_ok=True)
            delete_manifest(self.directory)
        with self._changed:
            self._closed = True
            self._index.clear()

    def _read(self, key: str, out: NDArray[np.uint8]) -> None:
        with self._changed:
            tile = self._tile(key)
            _check_length(key, tile, out)
            self._holds[tile.offset] += 1
            self._num_transfers += 1
        try:
            start_s = time.perf_counter()
            self._file.read(tile.offset, out)
            found = _checksum(out)
            if found != tile.checksum:
                msg = (
                    f"tile {key!r} ({tile.nbytes} bytes at offset {tile.offset} of "
                    f"{self.path}) is damaged: checksum stored {tile.checksum:016x}, "
                    f"computed {found:016x}. Do not use this disk or its file until it "
                    "has been checked; go back to a checkpoint elsewhere"
                )
                raise ChecksumError(msg)
            end_s = time.perf_counter()
        finally:
            with self._changed:
                self._drop(tile)
                self._num_transfers -= 1
        self._done("READ", key, tile.nbytes, start_s, end_s)

    def _write(
        self, key: str, data: NDArray[np.uint8], codec: str, generation: int
    ) -> None:
        tile: Tile | None = None
        try:
            start_s = time.perf_counter()
            checksum = _checksum(data)
            with self._changed:
                offset = self._allocate(key, data.nbytes)
                tile = Tile(offset, data.nbytes, codec, checksum, generation)
                self._num_transfers += 1
            self._file.write(offset, data)
            end_s = time.perf_counter()
            with self._changed:
                self._flip(key, tile)
        finally:
            with self._changed:
                self._num_puts -= 1
                if not self._num_puts:
                    self._deleted.clear()
                if tile is not None:
                    self._drop(tile)
                    self._num_transfers -= 1
        self._done("WRITE", key, data.nbytes, start_s, end_s)

    def _flip(self, key: str, tile: Tile) -> None:
        """Make `tile` the version of `key`, unless a newer one or a delete came first."""
        old = self._index.get(key)
        newest = max(old.generation if old else 0, self._deleted.get(key, 0))
        if newest > tile.generation:
            return
        self._holds[tile.offset] += 1
        self._index[key] = tile
        if old:
            self._drop(old)

    def _allocate(self, key: str, nbytes: int) -> int:
        """Return the offset of free space, held once; waits for space about to be free."""
        deadline = time.monotonic() + _SPACE_TIMEOUT_S
        while True:
            offset = self._extents.allocate(nbytes)
            if offset is not None:
                try:
                    self._file.grow(self._extents.end_bytes, self.max_bytes)
                    break
                except StoreError:
                    self._extents.free(offset, nbytes)
                    if not self._wait_for_space(deadline):
                        raise
            elif not self._wait_for_space(deadline):
                raise BudgetError(self._why_no_space(key, nbytes))
        self._peak_bytes = max(self._peak_bytes, self._file.size_bytes)
        self._holds[offset] += 1
        return offset

    def _wait_for_space(self, deadline: float) -> bool:
        """Wait until a transfer ends, if one runs: it may let an old version go."""
        left_s = deadline - time.monotonic()
        return self._num_transfers > 0 and left_s > 0 and self._changed.wait(left_s)

    def _drop(self, tile: Tile) -> None:
        """Give up one hold on a tile; the last one frees its space."""
        self._holds[tile.offset] -= 1
        if not self._holds[tile.offset]:
            del self._holds[tile.offset]
            self._extents.free(tile.offset, tile.extent_bytes)
        self._changed.notify_all()

    def _reserve_index(self) -> None:
        """Take over the tiles of a manifest; the rest of the file is free space."""
        tiles = self._index.values()
        try:
            self._extents.reserve([(tile.offset, tile.extent_bytes) for tile in tiles])
        except ValueError as error:
            msg = f"the manifest does not fit {self.path}: {error}"
            raise StoreError(msg) from error
        end_bytes, size_bytes = self._extents.end_bytes, self._file.size_bytes
        if end_bytes > size_bytes:
            msg = f"{self.path} has {size_bytes} bytes, its manifest names {end_bytes}"
            raise StoreError(msg)
        if self.max_bytes is not None and end_bytes > self.max_bytes:
            msg = (
                f"{self.path} holds tiles up to {format_bytes(end_bytes)}, the budget is "
                f"{format_bytes(self.max_bytes)}; raise max_disk_gb"
            )
            raise BudgetError(msg)
        self._holds.update(tile.offset for tile in tiles)
        self._file.shrink(end_bytes)

    def _done(
        self, op: str, key: str, nbytes: int, start_s: float, end_s: float
    ) -> None:
        with self._changed:
            if op == "READ":
                self.read_bytes += nbytes
            else:
                self.written_bytes += nbytes
        if self._on_io is not None:
            self._on_io(IoRecord(op, key, nbytes, start_s, end_s))

    def _tile(self, key: str) -> Tile:
        try:
            return self._index[key]
        except KeyError:
            msg = f"no tile {key!r} in {self.path} ({len(self._index)} tiles)"
            raise StoreError(msg) from None

    def _check_open(self) -> None:
        if self._closing:
            msg = f"the store in {self.directory} is closed"
            raise StoreError(msg)

    def _why_no_space(self, key: str, nbytes: int) -> str:
        limit = self.max_bytes or 0
        free = limit - self._extents.used_bytes
        return (
            f"tile {key!r} needs {format_bytes(round_up(nbytes))} on disk; of the budget "
            f"of {format_bytes(limit)} {format_bytes(self.used_bytes)} are used, "
            f"{format_bytes(free)} are left (largest piece "
            f"{format_bytes(max(self._extents.largest_free_bytes, limit - self._extents.end_bytes))}"
            f"); the disk itself has {format_bytes(free_bytes(self.path))} free. "
            "Raise max_disk_gb; a replaced tile is freed only after its successor is "
            "written"
        )


# xxh3 runs at 30 to 45 GB/s on one core, far above any disk, and releases the GIL for
# the whole call (a spinning Python thread kept 97 % of its speed, two threads hashed
# twice as much as one): one call over the tile on the I/O thread is all it takes.
def _checksum(data: NDArray[np.uint8]) -> int:
    return xxh3_64_intdigest(data.reshape(-1).data)


def _check_array(array: NDArray[np.uint8], key: str, *, writeable: bool) -> None:
    usable = array.dtype == np.uint8 and array.flags.c_contiguous
    if not usable or (writeable and not array.flags.writeable):
        need = "a writeable" if writeable else "a"
        msg = (
            f"tile {key!r}: expected {need} C-contiguous uint8 array, got {array.dtype} "
            f"of shape {array.shape}; use .view('u1') or np.ascontiguousarray"
        )
        raise ArgumentError(msg)


def _check_length(key: str, tile: Tile, out: NDArray[np.uint8]) -> None:
    if out.nbytes != tile.nbytes:
        msg = f"tile {key!r} has {tile.nbytes} bytes, the output {out.nbytes}"
        raise StoreError(msg)
