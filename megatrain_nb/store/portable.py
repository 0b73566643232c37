"""Checkpoints that move to another disk or machine.

A portable folder is an offload directory that holds one checkpoint and nothing else. So there is no second
format: it is read, checked and protected as every other one, and `mt.init` can open it as it is.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.codec.lossless.chunks import ITEM_BYTES
from megatrain_nb.errors import ArgumentError, BudgetError, StoreError
from megatrain_nb.store.base import round_up, wait
from megatrain_nb.store.checkpoint import (
    Checkpoint,
    read_checkpoints,
    sync_directory,
    write_checkpoint,
)
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.host import HostPool, map_pages
from megatrain_nb.store.owner import kept_still
from megatrain_nb.store.packing import STAGING_BYTES
from megatrain_nb.store.preflight import takes_direct
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from megatrain_nb.store.manifest import Manifest, Tile

_TIMEOUT_S = 120.0
_NUM_THREADS = 2
_NUM_TILES = 3
# What a tile of a folder from elsewhere may take of RAM; a session writes tiles of a quarter of it at most.
_MOST_TILE_BYTES = 64 << 20


def export_checkpoint(
    checkpoint: Checkpoint, store: DiskStore, folder: Path, *, most_bytes: int
) -> Path:
    """Copy a checkpoint out of a store, three tiles in RAM at a time; a crash leaves no half folder.

    ``most_bytes`` is what its files beside the tiles may take of RAM.

    Raises
    ------
    ArgumentError
        The folder exists.
    StoreError
        There is no room, a disk failed, or a tile is damaged.
    """
    folder = folder.expanduser().absolute()
    if os.path.lexists(folder):
        msg = f"{folder} exists; give the name of a folder that is to be made"
        raise ArgumentError(msg)
    temporary = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700, parents=True)
        with ExitStack() as closing:
            closing.callback(shutil.rmtree, temporary, ignore_errors=True)
            target = _open(temporary, packing=checkpoint.manifest.packed)
            closing.callback(target.close)
            manifest = _copy_tiles(checkpoint.manifest, store, target)
            _write_copy(
                checkpoint,
                target,
                manifest,
                number=1,
                name=checkpoint.name,
                most_bytes=most_bytes,
            )
            target.close()
            temporary.rename(folder)
            sync_directory(folder.parent)
    except OSError as error:
        msg = f"cannot export {checkpoint.name!r} to {folder}: {error.strerror}"
        raise StoreError(msg) from error
    return folder


def import_checkpoint(
    folder: Path,
    store: DiskStore,
    *,
    number: int,
    most_bytes: int,
    name: str | None = None,
) -> Checkpoint:
    """Copy the checkpoint of a portable folder into a store, every tile checked; the folder stays.

    Packed tiles stay packed if the store packs tiles; otherwise they are unpacked.

    Parameters
    ----------
    folder
        What `export_checkpoint` made, or an offload directory with one checkpoint; it may be read-only.
    number
        Larger than that of any checkpoint of the store.
    most_bytes
        What it may take of RAM: its manifest, the files beside it, and tiles on their way.
    name
        A new name; None keeps its own.

    Raises
    ------
    ArgumentError
        There is not one checkpoint in it.
    StoreError
        It is damaged, there is no room, a disk failed, or it takes more RAM than it may.
    """
    folder = folder.expanduser().absolute()
    if not folder.is_dir():
        msg = f"{folder} is not a folder"
        raise ArgumentError(msg)
    with ExitStack() as closing:
        closing.enter_context(kept_still(folder))
        found = read_checkpoints(folder, most_bytes=most_bytes)
        if len(found) != 1:
            msg = f"{folder} holds {len(found)} checkpoints, not one; give a folder that export_checkpoint made"
            raise ArgumentError(msg)
        pinned = found[0].manifest
        largest = max((tile.nbytes for tile in pinned.tiles.values()), default=0)
        allowed = min(_MOST_TILE_BYTES, most_bytes // _NUM_TILES)
        if largest > allowed:
            msg = (
                f"{found[0].folder} has a tile of {format_bytes(largest)}, and {format_bytes(allowed)} are allowed: it is "
                "damaged, or max_ram_gb is too small for it"
            )
            raise StoreError(msg)
        source = _open(folder, packing=pinned.packed, pinned=[pinned])
        closing.callback(source.close)
        manifest = _copy_tiles(pinned, source, store)
        return _write_copy(
            found[0],
            store,
            manifest,
            number=number,
            name=name or found[0].name,
            most_bytes=most_bytes,
        )


def _open(
    directory: Path, *, packing: bool, pinned: Sequence[Manifest] = ()
) -> DiskStore:
    """Open a store for copying, past the page cache where that is possible; what is pinned is only read."""
    staging = HostPool(_NUM_THREADS * STAGING_BYTES) if packing else None
    return DiskStore(
        directory,
        num_threads=_NUM_THREADS,
        direct=takes_direct(directory),
        pinned=pinned,
        staging=staging,
        read_only=bool(pinned),
    )


def _copy_tiles(manifest: Manifest, source: DiskStore, target: DiskStore) -> Manifest:
    """Return the same tiles, pinned in another store; one is read while the ones before are written."""
    codecs = {name: _codec_in(target, tile) for name, tile in manifest.tiles.items()}
    _check_room(manifest, codecs, target)
    largest = max((tile.nbytes for tile in manifest.tiles.values()), default=0)
    size = round_up(max(largest, 1))
    pages = [np.frombuffer(map_pages(size), np.uint8) for _ in range(_NUM_TILES)]
    # The last read or write of each piece of memory.
    moving: list[Future[None] | None] = [None] * _NUM_TILES
    keys: dict[str, str] = {}
    names = list(manifest.tiles)
    parts = [pages[i % _NUM_TILES][: manifest.tiles[x].nbytes] for i, x in enumerate(names)]  # fmt: skip
    try:
        for turn in range(len(names) + 1):
            if turn < len(names):
                slot, name = turn % _NUM_TILES, names[turn]
                _land(moving[slot], name)
                moving[slot] = source.get_into(name, parts[turn], of=manifest)
            if turn:
                slot, name = (turn - 1) % _NUM_TILES, names[turn - 1]
                _land(moving[slot], name)
                key = f"copy/{name}"
                moving[slot] = target.put(key, parts[turn - 1], codec=codecs[name])
                keys[name] = key
        for each in moving:
            _land(each, "the last tiles")
        return target.pin(keys)
    finally:
        for each in moving:
            if each is not None:
                each.cancel()
                each.exception(_TIMEOUT_S) if not each.cancelled() else None
        for key in keys.values():
            if key in target:
                target.delete(key)


def _check_room(
    manifest: Manifest, codecs: Mapping[str, str], target: DiskStore
) -> None:
    needed = sum(
        tile.extent_bytes
        if codecs[name] == tile.codec
        else round_up(max(tile.nbytes, 1))
        for name, tile in manifest.tiles.items()
    )
    room = target.capacity_bytes - target.used_bytes
    if needed > room:
        msg = (
            f"the checkpoint needs {format_bytes(needed)} in {target.directory}, and "
            f"{format_bytes(room)} are left there; remove other checkpoints, or make room"
        )
        raise BudgetError(msg)


def _codec_in(target: DiskStore, tile: Tile) -> str:
    """Return what a tile is put with: a store without staging gets it unpacked."""
    return "raw" if tile.codec in ITEM_BYTES and not target.packs else tile.codec


def _write_copy(
    checkpoint: Checkpoint,
    target: DiskStore,
    manifest: Manifest,
    *,
    number: int,
    name: str,
    most_bytes: int,
) -> Checkpoint:
    try:
        target.sync()
        state, tensors = checkpoint.read(most_bytes=most_bytes)
        return write_checkpoint(
            target.directory,
            number,
            replace(checkpoint.label, name=name),
            manifest,
            state=state,
            tensors=tensors,
        )
    except BaseException:
        target.unpin(manifest)
        raise


def _land(future: Future[None] | None, name: str) -> None:
    if future is not None:
        wait(future, what=f"copying {name}", timeout_s=_TIMEOUT_S)
