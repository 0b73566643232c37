"""Which version of each tile was current at one moment, and where it lies in the data file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatrain_nb.codec.lossless.chunks import ITEM_BYTES
from megatrain_nb.store.base import ALIGN_BYTES, round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MAX_TEXT = 500
_MAX_PARTS = 2**16
_MAX_OFFSET = 2**60
_LIMITS = {
    "nbytes": 2**40,
    "packed_bytes": 2**40,
    "checksum": 2**64,
    "generation": 2**63,
}

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
    def extent_bytes(self) -> int:
        """Bytes the tile occupies on disk."""
        return sum(length for _, length in self.parts)

    @property
    def packed(self) -> bool:
        """Whether it is shorter on disk."""
        return self.packed_bytes < self.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """The tiles of a store at one moment; compared by identity, as a pin is."""

    tiles: Mapping[str, Tile]

    @property
    def extent_bytes(self) -> int:
        """Bytes that its tiles occupy on disk, whoever else holds them."""
        return extent_bytes([self])

    @property
    def packed(self) -> bool:
        """Whether some of its tiles are shorter on disk."""
        return any(tile.packed for tile in self.tiles.values())


def extent_bytes(manifests: Iterable[Manifest]) -> int:
    """Return the bytes that manifests occupy on disk together: a tile of several counts once."""
    tiles = (tile for manifest in manifests for tile in manifest.tiles.values())
    return sum({tile.offset: tile.extent_bytes for tile in tiles}.values())


def format_tiles(manifest: Manifest) -> dict[str, Any]:
    """Return the tiles as what JSON can hold."""
    return {key: asdict(tile) for key, tile in sorted(manifest.tiles.items())}


def parse_tiles(content: Any) -> Manifest:
    """Return what `format_tiles` made, from a source that is not trusted.

    Raises
    ------
    ValueError
        Says what is wrong with it.
    """
    if not isinstance(content, dict):
        msg = "the tiles are not a table"
        raise ValueError(msg)  # noqa: TRY004 - a fault of the file, not of the program
    return Manifest({_key(key): _tile(key, tile) for key, tile in content.items()})


def _key(key: str) -> str:
    if not 0 < len(key) <= _MAX_TEXT:
        msg = f"a tile is called {json.dumps(key[:_MAX_TEXT])[:_MAX_TEXT]}"
        raise ValueError(msg)
    return key


def _tile(key: str, fields: Any) -> Tile:
    if not isinstance(fields, dict) or fields.keys() != {*_LIMITS, "codec", "parts"}:
        msg = f"tile {key!r} has other fields than parts, {', '.join(_LIMITS)}, codec"
        raise ValueError(msg)
    for name, limit in _LIMITS.items():
        if not _is_count(fields[name], limit):
            msg = f"tile {key!r} has {name} {str(fields[name])[:80]}"
            raise ValueError(msg)
    codec = fields["codec"]
    if not isinstance(codec, str) or len(codec) > _MAX_TEXT:
        msg = f"tile {key!r} has a codec that is not a name"
        raise ValueError(msg)
    parts = _parts(key, fields["parts"])
    nbytes, packed_bytes = fields["nbytes"], fields["packed_bytes"]
    # Of a float half is no exponent and stays as it is, so more than that is never saved.
    if not nbytes <= 2 * packed_bytes <= 2 * nbytes or (
        packed_bytes < nbytes and codec not in ITEM_BYTES
    ):
        msg = f"tile {key!r} of {nbytes} bytes has {packed_bytes} on disk, as {codec[:80]!r}"
        raise ValueError(msg)
    if sum(length for _, length in parts) != round_up(max(packed_bytes, 1)):
        msg = f"tile {key!r} does not fit its place"
        raise ValueError(msg)
    return Tile(**(fields | {"parts": parts}))


def _parts(key: str, parts: Any) -> Parts:
    """Return the ranges of a tile: whole pages, at least one, none twice."""
    if not isinstance(parts, list) or not 0 < len(parts) <= _MAX_PARTS:
        msg = f"tile {key!r} has no place"
        raise ValueError(msg)
    for part in parts:
        if not isinstance(part, list) or len(part) != 2:
            msg = f"tile {key!r} has a place that is not a range"
            raise ValueError(msg)
        for value in part:
            if not _is_count(value, _MAX_OFFSET) or value % ALIGN_BYTES:
                msg = f"tile {key!r} lies at {str(value)[:80]}, not on a page"
                raise ValueError(msg)
    ranges = tuple((offset, length) for offset, length in parts)
    if not all(length for _, length in ranges):
        msg = f"tile {key!r} has an empty range"
        raise ValueError(msg)
    return ranges


def _is_count(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit
