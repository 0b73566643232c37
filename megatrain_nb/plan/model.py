"""A model as the planner sees it: blocks that compute, packs that are stored.

A *block* is what computes as one piece (a decoder layer, the embedding, the head). A *pack* is what
is stored as one piece: the flat fp32 vector of the parameters that a block owns. The two differ
where weights are tied: the pack is owned once and used by two blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BYTES_PER_WEIGHT = 4
BYTES_PER_GRAD = 4
BYTES_PER_STATES = 8  # exp_avg and exp_avg_sq, fp32 each

# Parameters start on a cache line, packs fill whole pages: both are what direct I/O and the vector
# units ask for.
_PARAM_ALIGN = 16
_PACK_ALIGN = 1024

# The unit of disk traffic: 16 MiB of weights, of gradients, or of one moment.
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
    """The parameters stored as one flat fp32 vector of ``numel`` elements (padding included)."""

    index: int
    name: str
    params: tuple[ParamSpec, ...]
    numel: int

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
        """Bytes of the fp32 weights."""
        return self.numel * BYTES_PER_WEIGHT


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
        """Return the bytes of fp32 weights that block ``index`` needs at once."""
        return sum(self.packs[pack].weight_bytes for pack in self.blocks[index].packs)

    @property
    def num_params(self) -> int:
        """Parameters, each tied one counted once."""
        return sum(param.numel for pack in self.packs for param in pack.params)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all fp32 weights, padding included."""
        return sum(pack.weight_bytes for pack in self.packs)

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and moments together."""
        return (
            self.weight_bytes
            * (BYTES_PER_WEIGHT + BYTES_PER_GRAD + BYTES_PER_STATES)
            // BYTES_PER_WEIGHT
        )


def pack_params(
    index: int, name: str, params: Sequence[tuple[str, tuple[int, ...]]]
) -> PackSpec:
    """Lay parameters out one after the other.

    Parameters
    ----------
    index, name
        Of the pack.
    params
        Name and shape of each parameter.

    Examples
    --------
    >>> pack = pack_params(0, "norm", [("weight", (10,)), ("bias", (10,))])
    >>> [param.offset for param in pack.params], pack.numel
    ([0, 16], 1024)
    """
    specs, offset = [], 0
    for param, shape in params:
        specs.append(ParamSpec(name=param, shape=shape, offset=offset))
        offset = _round_up(offset + math.prod(shape), _PARAM_ALIGN)
    return PackSpec(
        index=index,
        name=name,
        params=tuple(specs),
        numel=_round_up(offset, _PACK_ALIGN),
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
