"""Which version of each tile was current at one moment, and where it lies in the data file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatrain_nb.store.base import ALIGN_BYTES, round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MAX_TEXT = 500
_LIMITS = {"offset": 2**60, "nbytes": 2**40, "checksum": 2**64, "generation": 2**63}


@dataclass(frozen=True, slots=True)
class Tile:
    """One version of one tile.

    Attributes
    ----------
    offset, nbytes
        Where it lies in the data file.
    codec
        Name of the codec that made the bytes.
    checksum
        xxh3_64 of the bytes.
    generation
        Counts the puts of the store: of two versions the newer has the larger one.
    """

    offset: int
    nbytes: int
    codec: str
    checksum: int
    generation: int

    @property
    def extent_bytes(self) -> int:
        """Bytes the tile occupies on disk."""
        return round_up(max(self.nbytes, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """The tiles of a store at one moment; compared by identity, as a pin is."""

    tiles: Mapping[str, Tile]

    @property
    def extent_bytes(self) -> int:
        """Bytes that its tiles occupy on disk, whoever else holds them."""
        return extent_bytes([self])


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


def _key(key: Any) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= _MAX_TEXT:
        msg = f"a tile is called {json.dumps(key)[:_MAX_TEXT]}"
        raise ValueError(msg)
    return key


def _tile(key: str, fields: Any) -> Tile:
    if not isinstance(fields, dict) or fields.keys() != {*_LIMITS, "codec"}:
        msg = f"tile {key!r} has other fields than {', '.join(_LIMITS)}, codec"
        raise ValueError(msg)
    for name, limit in _LIMITS.items():
        value = fields[name]
        if type(value) is not int or not 0 <= value < limit:
            msg = f"tile {key!r} has {name} {str(value)[:80]}"
            raise ValueError(msg)
    codec = fields["codec"]
    if not isinstance(codec, str) or len(codec) > _MAX_TEXT:
        msg = f"tile {key!r} has a codec that is not a name"
        raise ValueError(msg)
    if fields["offset"] % ALIGN_BYTES:
        msg = f"tile {key!r} lies at {fields['offset']}, not on a page"
        raise ValueError(msg)
    return Tile(**fields)
