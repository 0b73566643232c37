"""A model as the planner sees it: blocks that compute, packs that are stored.

A *block* is what computes as one piece (a decoder layer, the embedding, the head). A *pack* is what
is stored as one piece: the flat vector of the parameters that a block owns. The two differ where
weights are tied: the pack is owned once and used by two blocks.

A pack is fp32, or *split*: it computes in bf16, and its fp32 numbers are stored as a bf16 half, which
streams, and a 16-bit half, which only the update needs. Either way a parameter takes 16 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_BYTES_PER_FLOAT = 4
_BYTES_PER_HALF = 2

# Parameters start on a cache line, packs fill whole pages: both are what direct I/O and the vector
# units ask for.
_CACHE_LINE = 64
_PAGE = 4096

# The unit of disk traffic: 16 MiB of fp32 weights, of gradients, or of one moment; 8 MiB of halves.
TILE_NUMEL = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """Where one parameter lies in its pack; offsets in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """Bytes of what only the update uses: two fp32 moments, and the lower halves of a split pack."""
        halves = self.numel * _BYTES_PER_HALF if self.split else 0
        return 2 * self.numel * _BYTES_PER_FLOAT + halves


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

    @property
    def num_params(self) -> int:
        """Parameters, each tied one counted once."""
        return sum(param.numel for pack in self.packs for param in pack.params)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that stream, padding included."""
        return sum(pack.weight_bytes for pack in self.packs)

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

    Examples
    --------
    >>> pack = pack_params(0, "norm", [("weight", (10,)), ("bias", (10,))])
    >>> [param.offset for param in pack.params], pack.numel
    ([0, 16], 1024)
    """
    size = _BYTES_PER_HALF if split else _BYTES_PER_FLOAT
    specs, offset = [], 0
    for param, shape in params:
        specs.append(ParamSpec(name=param, shape=shape, offset=offset))
        offset = _round_up(offset + math.prod(shape), _CACHE_LINE // size)
    return PackSpec(
        index=index,
        name=name,
        params=tuple(specs),
        numel=_round_up(offset, _PAGE // size),
        split=split,
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
