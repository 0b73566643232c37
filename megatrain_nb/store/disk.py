"""Tiles in one large file on NVMe, copy on write."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from megatrain_nb.codec.lossless.chunks import ITEM_BYTES, DamagedError
from megatrain_nb.errors import ArgumentError, ChecksumError, StoreError
from megatrain_nb.store.base import IoRecord
from megatrain_nb.store.lanes import Lanes
from megatrain_nb.store.manifest import Manifest, Tile, extent_bytes
from megatrain_nb.store.packing import STAGING_BYTES, Packing
from megatrain_nb.store.rate import RateMeter
from megatrain_nb.store.space import Space
from megatrain_nb.store.tilefile import TileFile
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    from megatrain_nb.store.host import HostPool, Slab
    from megatrain_nb.store.manifest import Parts

DATA_NAME = "tiles.bin"
_CLOSE_TIMEOUT_S = 30.0


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
    pinned
        Go on with the file in `directory`, these manifests pinned; what none of them
        names is free space.
    staging
        Where packed tiles pass through; None: tiles cannot be packed, nor packed
        ones read. `STAGING_BYTES` for each thread are taken at once and given back by
        `close`.
    read_only
        Only pinned tiles are read; the file stays as it is.

    Notes
    -----
    Tiles that are put with a codec of `megatrain_nb.codec.lossless` are packed by the I/O
    threads. ``nbytes`` stays what was put; ``packed_bytes`` of the manifest, the checksum
    and all counters are of what is on disk. Where packing saves no page the tile is stored
    as it is, so a tile never takes more than its own length.

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
        pinned: Sequence[Manifest] = (),
        staging: HostPool | None = None,
        read_only: bool = False,
    ) -> None:
        self.directory = directory
        self.path = directory / DATA_NAME
        self.read_bytes = 0
        self.written_bytes = 0
        self.rate = RateMeter()
        self._max_bytes = max_bytes
        self._on_io = on_io
        self._index: dict[str, Tile] = {}
        self._pins = set(pinned)
        self._deleted: dict[str, int] = {}
        self._num_puts = 0  # submitted and not yet finished
        self._closing = self._closed = False
        self._files = threading.Lock()  # one sync or close at a time
        tiles = [tile for manifest in pinned for tile in manifest.tiles.values()]
        self._generation = max((tile.generation for tile in tiles), default=0)
        self._staging = staging
        self._slabs: list[Slab] = []
        self._packings: SimpleQueue[Packing] = SimpleQueue()
        with ExitStack() as undo:
            undo.callback(self._give_staging)
            self._take_staging(num_threads)
            self._file = TileFile(
                self.path, direct=direct, create=not pinned, read_only=read_only
            )
            undo.callback(self._file.close)
            self._space = Space(self._file, max_bytes, tiles)
            undo.pop_all()
        self._lanes = Lanes(num_threads, "megatrain-io")

    def __repr__(self) -> str:
        state = "closed" if self._closing else f"{len(self._index)} tiles"
        return f"<DiskStore {self.path} {state} {format_bytes(self.used_bytes)}>"

    def put(
        self, key: str, data: NDArray[np.uint8], *, codec: str = "raw"
    ) -> Future[None]:
        """Store the bytes of `data` under `key`; the old version stays until then.

        Raises
        ------
        ArgumentError
            At the call: a codec that packs, and this store has no staging for it.
        BudgetError
            From the future: no room within `max_bytes`; the old version is in place.
        StoreError
            At the call: closed. From the future: the disk is full or failed; the old
            version is in place.
        """
        _check_array(data, key, writeable=False)
        self._check_packing(codec)
        with self._space.changed:
            self._check_open()
            self._generation += 1
            self._num_puts += 1
            work = partial(self._write, key, data, codec, self._generation)
            return self._lanes.submit(work, write=True)

    def get_into(
        self, key: str, out: NDArray[np.uint8], *, of: Manifest | None = None
    ) -> Future[None]:
        """Fill `out` with the tile: the current one, or that ``of`` a pinned manifest.

        Raises
        ------
        ChecksumError
            From the future: the bytes on disk are not the bytes that were put.
        StoreError
            At the call: closed, or no such tile. From the future: the disk failed, or
            the tile was deleted or changed its length before its turn came.
        """
        _check_array(out, key, writeable=True)
        with self._space.changed:
            self._check_open()
            if of is not None:
                self._check_pinned(of)
            tile = self._tile(key, of)
            _check_length(key, tile, out)
            if tile.packed:
                self._check_packing(tile.codec)
            return self._lanes.submit(partial(self._read, key, out, of), write=False)

    def delete(self, key: str) -> None:
        """Forget the tile; puts of it that are still queued are void."""
        with self._space.changed:
            self._check_open()
            self._space.drop(self._tile(key).parts)
            del self._index[key]
            self._generation += 1
            if self._num_puts:
                self._deleted[key] = self._generation

    def __contains__(self, key: object) -> bool:
        with self._space.changed:
            self._check_open()
            return key in self._index

    def nbytes(self, key: str) -> int:
        """Return the length of the tile in bytes, as it was put."""
        with self._space.changed:
            self._check_open()
            return self._tile(key).nbytes

    def codec(self, key: str) -> str:
        """Return the name of the codec that the tile was put with."""
        with self._space.changed:
            self._check_open()
            return self._tile(key).codec

    def packed_sizes(self) -> tuple[int, int]:
        """Return the bytes of all tiles put with a codec that packs: as put, and on disk."""
        with self._space.changed:
            tiles = [tile for tile in self._index.values() if tile.codec in ITEM_BYTES]
        return sum(t.nbytes for t in tiles), sum(t.packed_bytes for t in tiles)

    @property
    def packs(self) -> bool:
        """Whether tiles can be packed, and packed ones read."""
        return self._staging is not None

    @property
    def staging_bytes(self) -> int:
        """Memory that packing takes as long as the store is open."""
        return sum(slab.nbytes for slab in self._slabs)

    def keys(self) -> list[str]:
        """Return the keys, sorted."""
        with self._space.changed:
            self._check_open()
            return sorted(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that hold tiles, old versions still held included."""
        return self._space.used_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest size the file has had."""
        return self._space.peak_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes that tiles may occupy: the budget, or what the disk has now."""
        room = self._file.size_bytes + self._file.free_bytes
        return room if self._max_bytes is None else min(room, self._max_bytes)

    def pinned_bytes(self, *, without: Container[Manifest] = ()) -> int:
        """Bytes that pinned manifests occupy together, but for those ``without``."""
        with self._space.changed:
            return extent_bytes(m for m in self._pins if m not in without)

    def pin(self, keys: Mapping[str, str] | None = None) -> Manifest:
        """Return the tiles of this moment and keep them on disk until `unpin`.

        Parameters
        ----------
        keys
            By its name in the manifest, each tile's key; None takes all, under their keys.
        """
        with self._space.changed:
            self._check_open()
            if keys is None:
                keys = {key: key for key in self._index}
            manifest = Manifest({name: self._tile(key) for name, key in keys.items()})
            self._pins.add(manifest)
            for tile in manifest.tiles.values():
                self._space.hold(tile.parts)
            return manifest

    def unpin(self, manifest: Manifest) -> None:
        """Let the tiles of a pinned manifest go where nothing else holds them."""
        with self._space.changed:
            self._check_open()
            self._check_pinned(manifest)
            self._pins.remove(manifest)
            for tile in manifest.tiles.values():
                self._space.drop(tile.parts)
            self._space.give_back()

    def restore(self, manifest: Manifest, keys: Mapping[str, str]) -> None:
        """Make tiles of a pinned manifest the current ones; nothing is read or written.

        Parameters
        ----------
        keys
            By key, each tile's name in the manifest. No put of these keys may be running.
        """
        with self._space.changed:
            self._check_open()
            self._check_pinned(manifest)
            tiles = {key: self._tile(name, manifest) for key, name in keys.items()}
            for key, tile in tiles.items():
                self._space.hold(tile.parts)
                if key in self._index:
                    self._space.drop(self._index[key].parts)
                self._index[key] = tile

    def sync(self) -> None:
        """Return when the medium has every tile whose put is done."""
        with self._files:
            with self._space.changed:
                self._check_open()
            self._file.sync()

    def close(self) -> None:
        """Wait for running transfers, join the threads; only pinned tiles stay; idempotent.

        What is queued is cancelled. Where nothing is pinned the file is deleted.

        Raises
        ------
        StoreError
            Transfers are still running after 30 s. The store takes no more calls, and
            its threads and file stay: closing a file under a transfer is not safe.
        """
        with self._space.changed:
            self._closing = True
        if not self._files.acquire(timeout=_CLOSE_TIMEOUT_S):
            raise StoreError(self._why_not_closed("sync() has"))
        try:
            if not self._closed:
                self._close()
        finally:
            self._files.release()

    def _close(self) -> None:
        self._lanes.cancel_queued()
        left = self._lanes.drain(_CLOSE_TIMEOUT_S)
        if left:
            raise StoreError(self._why_not_closed(f"{left} transfers have"))
        self._lanes.shutdown()
        self._give_staging()
        self._closed = True
        try:
            if self._pins:
                with self._space.changed:
                    while self._index:
                        self._space.drop(self._index.popitem()[1].parts)
                    self._space.give_back(all_of_it=True)
        finally:
            self._file.close()
        if not self._pins:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                msg = f"cannot delete the tiles in {self.directory}: {error.strerror}"
                raise StoreError(msg) from error

    def _read(self, key: str, out: NDArray[np.uint8], of: Manifest | None) -> None:
        with self._space.changed:
            if of is not None:
                self._check_pinned(of)
            tile = self._tile(key, of)
            _check_length(key, tile, out)
            self._space.hold(tile.parts)
            self._space.num_transfers += 1
        try:
            start_s = time.perf_counter()
            try:
                found = self._move_in(tile, out)
            except DamagedError as error:
                raise ChecksumError(self._why_damaged(key, tile, str(error))) from error
            end_s = time.perf_counter()
            if found is None:
                found = _checksum(out)
            if found != tile.checksum:
                what = f"checksum stored {tile.checksum:016x}, computed {found:016x}"
                raise ChecksumError(self._why_damaged(key, tile, what))
        finally:
            with self._space.changed:
                self._space.drop(tile.parts)
                self._space.num_transfers -= 1
        self._done("READ", key, tile.packed_bytes, start_s, end_s)

    def _write(
        self, key: str, data: NDArray[np.uint8], codec: str, generation: int
    ) -> None:
        parts: Parts = ()
        try:
            checksum = None if codec in ITEM_BYTES else _checksum(data)
            with self._space.changed:
                parts = self._space.allocate(key, data.nbytes)
                self._space.num_transfers += 1
            start_s = time.perf_counter()
            packed = self._move_out_packed(parts, data, codec)
            if packed is None:
                if checksum is None:
                    checksum = _checksum(data)
                packed = data.nbytes, checksum
                self._move(self._file.write, parts, 0, data)
            end_s = time.perf_counter()
            with self._space.changed:
                parts = self._space.cut(parts, packed[0])
                tile = Tile(parts, data.nbytes, packed[0], codec, packed[1], generation)
                self._flip(key, tile)
        finally:
            with self._space.changed:
                self._num_puts -= 1
                if not self._num_puts:
                    self._deleted.clear()
                if parts:
                    self._space.drop(parts)
                    self._space.num_transfers -= 1
        self._done("WRITE", key, packed[0], start_s, end_s)

    def _move_in(self, tile: Tile, out: NDArray[np.uint8]) -> int | None:
        """Fill `out`; returns the checksum of a packed tile."""
        read = partial(self._move, self._file.read, tile.parts)
        if not tile.packed:
            read(0, out)
            return None
        with self._packing() as packing:
            return packing.read(tile.packed_bytes, ITEM_BYTES[tile.codec], out, read)

    def _move_out_packed(
        self, parts: Parts, data: NDArray[np.uint8], codec: str
    ) -> tuple[int, int] | None:
        """Write `data` packed; returns length and checksum, None where that is no use."""
        if codec not in ITEM_BYTES:
            return None
        write = partial(self._move, self._file.write, parts)
        with self._packing() as packing:
            return packing.write(data, ITEM_BYTES[codec], write)

    def _move(
        self,
        transfer: Callable[[int, NDArray[np.uint8]], None],
        parts: Parts,
        at: int,
        array: NDArray[np.uint8],
    ) -> None:
        """Transfer `array` as the bytes from `at` on of a tile that lies in these ranges."""
        array, begin, moved = array.reshape(-1), 0, 0
        with self.rate.moving(array.nbytes):
            for offset, length in parts:
                skip = max(at + moved - begin, 0)
                count = min(length - skip, array.nbytes - moved)
                if count > 0:
                    transfer(offset + skip, array[moved : moved + count])
                    moved += count
                begin += length

    @contextmanager
    def _packing(self) -> Iterator[Packing]:
        """Borrow the buffers of one thread; there are as many as threads."""
        packing = self._packings.get_nowait()
        try:
            yield packing
        finally:
            self._packings.put(packing)

    def _take_staging(self, count: int) -> None:
        for _ in range(count if self._staging else 0):
            assert self._staging is not None
            slab = self._staging.take(STAGING_BYTES, what="packing")
            self._slabs.append(slab)
            self._packings.put(Packing(slab.array[:STAGING_BYTES]))

    def _give_staging(self) -> None:
        slabs, self._slabs = self._slabs, []
        self._packings = SimpleQueue()
        for slab in slabs:
            assert self._staging is not None
            self._staging.give(slab)

    def _check_packing(self, codec: str) -> None:
        if codec in ITEM_BYTES and self._staging is None:
            msg = (
                f"codec={codec!r} packs tiles: open the store with staging=, a HostPool"
            )
            raise ArgumentError(msg)

    def _why_damaged(self, key: str, tile: Tile, what: str) -> str:
        return (
            f"tile {key!r} ({tile.packed_bytes} bytes at offset {tile.offset} of "
            f"{self.path}) is damaged: {what}. Do not use this disk or its file until it "
            "has been checked; go back to a checkpoint elsewhere"
        )

    def _flip(self, key: str, tile: Tile) -> None:
        """Make `tile` the version of `key`, unless a newer one or a delete came first."""
        old = self._index.get(key)
        newest = max(old.generation if old else 0, self._deleted.get(key, 0))
        if newest > tile.generation:
            return
        self._space.hold(tile.parts)
        self._index[key] = tile
        if old:
            self._space.drop(old.parts)

    def _done(
        self, op: str, key: str, nbytes: int, start_s: float, end_s: float
    ) -> None:
        with self._space.changed:
            if op == "READ":
                self.read_bytes += nbytes
            else:
                self.written_bytes += nbytes
        if self._on_io is not None:
            self._on_io(IoRecord(op, key, nbytes, start_s, end_s))

    def _tile(self, key: str, of: Manifest | None = None) -> Tile:
        tiles = self._index if of is None else of.tiles
        try:
            return tiles[key]
        except KeyError:
            msg = f"no tile {key!r} in {self.path} ({len(tiles)} tiles)"
            raise StoreError(msg) from None

    def _check_pinned(self, manifest: Manifest) -> None:
        if manifest not in self._pins:
            msg = "this manifest is not pinned (any more) in this store"
            raise StoreError(msg)

    def _why_not_closed(self, who: str) -> str:
        return (
            f"{who} not finished in {_CLOSE_TIMEOUT_S:g} s, so {self.path} stays open: "
            "the disk is stalled. Call close() again later"
        )

    def _check_open(self) -> None:
        if self._closing:
            msg = f"the store in {self.directory} is closed"
            raise StoreError(msg)


# xxh3 hashes 20 GB/s from RAM on one core (40 from cache), far above any disk, and gives
# the GIL up for the whole call (a spinning Python thread kept 97 % of its speed, two
# threads hashed twice as much as one): one call over the tile on the I/O thread will do.
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
