"""One kind of bytes of one pack: what the pager moves.

A pack has four pieces, flat fp32 vectors of the same length: weights, gradients and the two moments. A split pack
has five: its weights are the bf16 halves of fp32 numbers, and the lower halves are a piece of their own. In an
encoded pack both moments are one piece of bytes, see [Note: encoded moments].
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatrain_nb.codec.base import get

if TYPE_CHECKING:
    from concurrent.futures import Future

    from megatrain_nb.plan.model import PackSpec
    from megatrain_nb.runtime.lanes import Work
    from megatrain_nb.store.host import Slab


class What(Enum):
    """The kinds of bytes of a pack: flat vectors of float32, of uint16 (halves), or of bytes (encoded moments)."""

    WEIGHTS = "weights"
    LOW = "low"
    GRADS = "grads"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    ENCODED = "encoded"


MOMENTS = (What.EXP_AVG, What.EXP_AVG_SQ)

# What an array over a split pack's halves has; the weights among them are the bits of bf16 numbers.
_HALVES = (What.WEIGHTS, What.LOW)

Values = NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.uint8]


def states_of(pack: PackSpec) -> tuple[What, ...]:
    """Return what only the update of a pack uses, besides its gradient."""
    return (What.LOW, *moments_of(pack)) if pack.split else moments_of(pack)


def moments_of(pack: PackSpec) -> tuple[What, ...]:
    """Return what holds the moments of a pack."""
    return (What.ENCODED,) if pack.encoded else MOMENTS


def master_of(pack: PackSpec) -> tuple[What, ...]:
    """Return what holds the fp32 numbers of a pack: its weights, or their two halves."""
    return _HALVES if pack.split else (What.WEIGHTS,)


@dataclass(slots=True, eq=False)
class Piece:
    """One kind of bytes of one pack.

    Attributes
    ----------
    slab
        Its RAM, or None.
    loading
        Reads in flight into ``slab``.
    users
        Open ``need`` calls.
    resident
        Planned to stay in RAM.
    dirty
        The RAM copy is newer than the disk's.
    on_device
        The true copy is a device's: who changes what is here would lose it, see `megatrain_nb.runtime.tail`.
    old
        What is here and on the disk is not the last version any more: the device's is.
    lease
        The device's last copy out of ``slab`` or into it.
    num_bytes
        Bytes of the whole piece.
    label
        What its tiles are called; encoded in other codecs they have another name, so none reads another's bytes.
    """

    pack: PackSpec
    what: What
    slab: Slab | None = None
    loading: list[Future[None]] = field(default_factory=list)
    users: int = 0
    resident: bool = False
    dirty: bool = False
    on_device: bool = False
    old: bool = False
    lease: Work | None = None
    num_bytes: int = field(init=False)
    label: str = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = self.span(0, self.pack.numel)[1]
        self.label = self.what.value
        if self.what is What.ENCODED:
            codecs = ",".join(str(get(p.codec).to_config()) for p in self.pack.params)
            self.label += f"-{zlib.crc32(codecs.encode()):08x}"

    @property
    def dtype(self) -> np.dtype[Any]:
        """What its values are: float32, uint16 for a half, or bytes."""
        if self.what is What.ENCODED:
            return np.dtype(np.uint8)
        half = self.pack.split and self.what in _HALVES
        return np.dtype(np.uint16 if half else np.float32)

    @property
    def landed(self) -> bool:
        """Whether it is in RAM, and nothing of it still to come or to leave for a device."""
        if self.slab is None or self.lent:
            return False
        return all(read.done() for read in self.loading)

    @property
    def lent(self) -> bool:
        """Whether a device still copies out of it or into it."""
        return self.lease is not None and not self.lease.done()

    def values(self) -> Values:
        """Return the loaded values, shape (numel,), or all bytes of encoded moments."""
        assert self.slab is not None
        return self.slab.view(self.dtype, 0, self.num_bytes // self.dtype.itemsize)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes, first and end, of a tile of elements ``start`` to ``stop``."""
        if self.what is What.ENCODED:
            return self.pack.encoded_span(start, stop)
        return start * self.dtype.itemsize, stop * self.dtype.itemsize

    def part(self, start: int, stop: int) -> Values:
        """Return the loaded values of a tile."""
        first, end = self.span(start, stop)
        size = self.dtype.itemsize
        return self.values()[first // size : end // size]

    def bytes_in(self, slab: Slab, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes of a tile in a slab that holds the whole piece."""
        first, end = self.span(start, stop)
        return slab.view(np.uint8, first, end - first)

    def over(self, slab: Slab, start: int, stop: int) -> Values:
        """Return the values of a tile in a slab of its own."""
        first, end = self.span(start, stop)
        return slab.view(self.dtype, 0, (end - first) // self.dtype.itemsize)

    def blank(self, start: int, stop: int, out: NDArray[np.uint8]) -> None:
        """Write what a tile reads as that was never written."""
        out.fill(0)
        if self.what is What.ENCODED:
            for part in self.pack.moment_parts(start, stop):
                place = slice(part.first_byte, part.first_byte + part.num_bytes)
                get(part.param.codec).blank(out[place])

    def __str__(self) -> str:
        return f"{self.what.value} of {self.pack.name}"
