"""A model as the planner sees it: blocks that compute, packs that are stored.

A *block* is what computes as one piece (a decoder layer, the embedding, the head). A *pack* is what
is stored as one piece: the flat vector of the parameters that a block owns. The two differ where
weights are tied: the pack is owned once and used by two blocks.

A pack is fp32, or *split*: it computes in bf16, and its fp32 numbers are stored as a bf16 half, which
streams, and a 16-bit half, which only the update needs. Either way a parameter takes 16 bytes, unless its
moments are encoded.

[Note: encoded moments] Each parameter's moments have a codec; small parameters have ``raw``. A pack whose
parameters all have ``raw`` stores two vectors, as long as the pack. Any other pack is *encoded*: it stores both
moments as one piece of bytes. Each tile of it holds, one after the other, the encoded part of every parameter
that lies in the tile. A parameter that may be encoded gets room for whole units of `UNIT` elements, so the
bytes between two ends of units do not depend on how the pack is cut into tiles, and every part starts at a
multiple of 4 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatrain_nb.codec.base import BLOCK, get
from megatrain_nb.codec.dynamic import SMALL_NUMEL
from megatrain_nb.codec.names import RAW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_BYTES_PER_FLOAT = 4
_BYTES_PER_HALF = 2

# Parameters start on a cache line; those whose moments may be encoded start and end at multiples of a unit, so
# that a tile cuts them where blocks of the codecs end, see [Note: encoded moments].
_CACHE_LINE = 64
UNIT = 4 * BLOCK

# Packs fill whole pages, which direct I/O asks for.
_PAGE = 4096

# The unit of disk traffic: 16 MiB of fp32 weights, of gradients, or of one moment; 8 MiB of halves.
TILE_NUMEL = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """Where one parameter lies in its pack (offsets in elements), and the codec of its moments."""

    name: str
    shape: tuple[int, ...]
    offset: int
    codec: str = RAW

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class MomentPart:
    """The encoded moments of a parameter, or of a part of one, in a tile.

    Attributes
    ----------
    param
        Which.
    start, stop
        Elements of the pack.
    first_byte, num_bytes
        Where its bytes are in the tile's.
    """

    param: ParamSpec
    start: int
    stop: int
    first_byte: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class PackSpec:
    """The parameters stored as one flat vector of ``numel`` elements (padding included).

    Attributes
    ----------
    split
        Computes in bf16; the fp32 numbers are stored as two halves.
    """

    index: int
    name: str
    params: tuple[ParamSpec, ...]
    numel: int
    split: bool = False

    def tiles(self, tile_numel: int = TILE_NUMEL) -> list[tuple[int, int]]:
        """Return the element ranges that are read and written as one piece.

        Examples
        --------
        >>> pack_params(0, "head", [("weight", (3, 1024))]).tiles(2048)
        [(0, 2048), (2048, 3072)]
        """
        return [
            (start, min(start + tile_numel, self.numel))
            for start in range(0, self.numel, tile_numel)
        ]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that stream: fp32, or the bf16 halves."""
        return self.numel * (_BYTES_PER_HALF if self.split else _BYTES_PER_FLOAT)

    @property
    def grad_bytes(self) -> int:
        """Bytes of the fp32 gradients."""
        return self.numel * _BYTES_PER_FLOAT

    @property
    def states_bytes(self) -> int:
        """Bytes of what only the update uses: both moments, and the lower halves of a split pack."""
        halves = self.numel * _BYTES_PER_HALF if self.split else 0
        return self.moments_bytes + halves

    def num_bytes(self, piece: str) -> int:
        """Return the bytes of its ``weights``, ``grads`` or ``states``."""
        sizes = {"weights": self.weight_bytes, "grads": self.grad_bytes}
        return sizes.get(piece, self.states_bytes)

    @cached_property
    def encoded(self) -> bool:
        """Whether its moments are one piece of bytes, see [Note: encoded moments]."""
        return any(param.codec != RAW for param in self.params)

    @cached_property
    def moments_bytes(self) -> int:
        """Bytes of both moments: fp32, or encoded and filled up to whole pages."""
        if not self.encoded:
            return 2 * self.numel * _BYTES_PER_FLOAT
        return _round_up(self._bytes_before(self.numel), _PAGE)

    def encoded_span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes, first and end, of the encoded moments of elements ``start`` to ``stop``.

        Both are multiples of `UNIT`, as the ends of tiles are. The pack's last byte is the last of a page.
        """
        end = self.moments_bytes if stop >= self.numel else self._bytes_before(stop)
        return self._bytes_before(start), end

    def moment_parts(self, start: int, stop: int) -> list[MomentPart]:
        """Return what the tile of elements ``start`` to ``stop`` holds of each parameter.

        Examples
        --------
        >>> params = [("w", (128, 32)), ("b", (32,))]
        >>> pack = pack_params(0, "up", params, codecs={"w": "4bit"})
        >>> [
        ...     (p.param.name, p.first_byte, p.num_bytes)
        ...     for p in pack.moment_parts(0, 5120)
        ... ]
        [('w', 0, 4192), ('b', 4192, 256)]
        """
        before, parts = self._bytes_before(start), []
        for param, _, place in self._places():
            first = max(param.offset, start)
            last = min(param.offset + param.numel, stop)
            if first < last:
                encoded = get(param.codec).encoded_bytes
                first_byte = place + encoded(first - param.offset) - before
                size = encoded(last - first)
                parts.append(MomentPart(param, first, last, first_byte, size))
        return parts

    @property
    def layout(self) -> tuple[object, ...]:
        """What its bytes follow from: packs of equal layers have the same."""
        places = tuple((param.offset, param.codec) for param in self.params)
        return self.numel, self.split, places

    def with_codecs(self, codecs: Mapping[str, str]) -> PackSpec:
        """Return the same pack with these codecs, by parameter name; others stay."""
        params = (
            replace(param, codec=codecs.get(param.name, param.codec))
            for param in self.params
        )
        return replace(self, params=tuple(params))

    def _bytes_before(self, element: int) -> int:
        """Return the bytes of the encoded moments before an element where a tile may end."""
        return sum(
            get(param.codec).encoded_bytes(min(element, end) - param.offset)
            for param, end, _ in self._places()
            if param.offset < element
        )

    def _places(self) -> Iterator[tuple[ParamSpec, int, int]]:
        """Yield each parameter, the end of its room in elements, and where its encoded moments start."""
        place = 0
        ends = [param.offset for param in self.params[1:]] + [self.numel]
        for param, end in zip(self.params, ends, strict=True):
            yield param, end, place
            place += get(param.codec).encoded_bytes(end - param.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """What computes as one piece, and the packs it needs while it does."""

    index: int
    name: str
    packs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """All blocks in the order they were registered, and all packs."""

    blocks: tuple[BlockSpec, ...]
    packs: tuple[PackSpec, ...]

    def block_bytes(self, index: int) -> int:
        """Return the bytes of weights that block ``index`` needs at once."""
        return sum(pack.weight_bytes for pack in self.packs_of(index))

    def packs_of(self, index: int) -> list[PackSpec]:
        """Return the packs of block ``index``."""
        return [self.packs[pack] for pack in self.blocks[index].packs]

    def pack_indices(self, blocks: Iterable[int]) -> list[int]:
        """Return the packs that some blocks use, by index, in the order of the blocks; each once."""
        found = (pack for block in blocks for pack in self.blocks[block].packs)
        return list(dict.fromkeys(found))

    def owners(self) -> dict[int, int]:
        """Return the block that owns each pack, by index: the first one that uses it."""
        found: dict[int, int] = {}
        for block in self.blocks:
            for pack in block.packs:
                found.setdefault(pack, block.index)
        return found

    @property
    def num_params(self) -> int:
        """Parameters, each tied one counted once."""
        return sum(param.numel for pack in self.packs for param in pack.params)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that stream, padding included."""
        return sum(pack.weight_bytes for pack in self.packs)

    @property
    def moments_bytes(self) -> int:
        """Bytes of all moments, padding included."""
        return sum(pack.moments_bytes for pack in self.packs)

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and moments together."""
        return sum(
            pack.weight_bytes + pack.grad_bytes + pack.states_bytes
            for pack in self.packs
        )


def pack_params(
    index: int,
    name: str,
    params: Sequence[tuple[str, tuple[int, ...]]],
    *,
    split: bool = False,
    codecs: Mapping[str, str] | None = None,
) -> PackSpec:
    """Lay parameters out one after the other.

    Parameters
    ----------
    index, name
        Of the pack.
    params
        Name and shape of each parameter.
    split
        Stored as two halves.
    codecs
        Of the moments, by parameter name; a parameter that is not in it has ``raw``.

    Examples
    --------
    >>> pack = pack_params(0, "norm", [("weight", (10,)), ("bias", (10,))])
    >>> [param.offset for param in pack.params], pack.numel
    ([0, 16], 1024)
    """
    size = _BYTES_PER_HALF if split else _BYTES_PER_FLOAT
    specs, offset = [], 0
    for param, shape in params:
        unit = _CACHE_LINE // size if math.prod(shape) < SMALL_NUMEL else UNIT
        codec = RAW if codecs is None else codecs.get(param, RAW)
        offset = _round_up(offset, unit)
        specs.append(ParamSpec(name=param, shape=shape, offset=offset, codec=codec))
        offset = _round_up(offset + math.prod(shape), unit)
    return PackSpec(
        index=index,
        name=name,
        params=tuple(specs),
        numel=_round_up(offset, _PAGE // size),
        split=split,
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
