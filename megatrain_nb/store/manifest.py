"""Where each tile lies: the part of a disk store that survives the process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatrain_nb.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST_NAME = "manifest.json"
TEMPORARY_NAME = "manifest.json.new"
_VERSION = 2


Parts = tuple[tuple[int, int], ...]
"""Ranges of the data file that together are one tile: offset and length of each."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One version of one tile.

    Attributes
    ----------
    parts
        Where it lies in the data file: offset and length of each range, whole pages.
    nbytes
        Its length as it was put.
    packed_bytes
        Its length on disk; less than ``nbytes`` where it is packed, and only there.
    codec
        Name of the codec that made the bytes.
    checksum
        xxh3_64 of the bytes on disk.
    generation
        Counts the puts of the store: of two versions the newer has the larger one.
    """

    parts: Parts
    nbytes: int
    packed_bytes: int
    codec: str
    checksum: int
    generation: int

    @property
    def offset(self) -> int:
        """Where it begins in the data file."""
        return self.parts[0][0]

    @property
    def packed(self) -> bool:
        """Whether it is shorter on disk."""
        return self.packed_bytes < self.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """The tiles of a store at one moment; compared by identity, as a pin is."""

    tiles: Mapping[str, Tile]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest file; a crash leaves the old or the new one, whole.

    Raises
    ------
    StoreError
        The file could not be written; the old one is in place.
    """
    tiles = {key: asdict(tile) for key, tile in sorted(manifest.tiles.items())}
    text = json.dumps({"version": _VERSION, "tiles": tiles}, indent=1)
    temporary, path = directory / TEMPORARY_NAME, directory / MANIFEST_NAME
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(directory)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        msg = f"cannot write {path}: {error.strerror}"
        raise StoreError(msg) from error


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest in `directory`, or None if there is none.

    Raises
    ------
    StoreError
        There is one, but it cannot be understood.
    """
    path = directory / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            msg = f"{path} has version {content['version']}, this program reads {_VERSION}"
            raise StoreError(msg)
        return Manifest({key: _tile(**tile) for key, tile in content["tiles"].items()})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        msg = f"{path} cannot be read ({error}); reclaim() deletes it and its tiles"
        raise StoreError(msg) from error


def _tile(parts: list[list[int]], **others: Any) -> Tile:
    ranges = tuple((int(offset), int(length)) for offset, length in parts)
    if sum(length for _, length in ranges) < others["packed_bytes"] or not ranges:
        msg = "a tile is longer than its place"
        raise ValueError(msg)
    return Tile(parts=ranges, **others)


def delete_manifest(directory: Path) -> None:
    """Delete the manifest and what a crash may have left of a new one."""
    for name in (MANIFEST_NAME, TEMPORARY_NAME):
        (directory / name).unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make renames and creations in `directory` survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
