"""What lossless packing saves on the disk, and what it costs the processor (docs/lossless.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatrain_nb.codec.names import MOMENTS, WEIGHTS

if TYPE_CHECKING:
    from megatrain_nb.plan.model import PackSpec

IO_THREADS = 4
"""How many threads of the store pack and unpack."""

PACKING_BYTES = IO_THREADS * 5_509_120
"""The RAM through which packed tiles pass, all threads together; a test compares it with the store's."""


class _Rates(NamedTuple):
    """How much smaller, and how fast one thread is, in unpacked bytes each second."""

    share: float
    pack_bytes_per_s: float
    unpack_bytes_per_s: float


# Measured on the states of a small training (docs/lossless.md); both moments together.
_WIDE = _Rates(1 / 1.20, 2.6e9, 5.4e9)
_HALF = _Rates(1 / 1.49, 1.4e9, 3.3e9)
_BOTH = _Rates(1 / 1.21, 2.2e9, 4.0e9)


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What a pack's pieces take on the disk.

    Attributes
    ----------
    packed
        Which kinds of pieces are packed there: ``weights``, ``moments``.
    """

    packed: frozenset[str] = frozenset()

    def num_bytes(self, piece: str, pack: PackSpec) -> int:
        """Return the bytes on disk of a pack's ``weights``, ``grads`` or ``states``.

        Examples
        --------
        >>> from megatrain_nb.plan.model import PackSpec
        >>> pack = PackSpec(index=0, name="up", params=(), numel=1200)
        >>> (
        ...     OnDisk().num_bytes("weights", pack),
        ...     OnDisk(frozenset({WEIGHTS})).num_bytes("weights", pack),
        ... )
        (4800, 4000)
        """
        whole, rates = self._of(piece, pack)
        saved = 0.0 if rates is None else whole * (1 - rates.share)
        return round(pack.num_bytes(piece) - saved)

    def pack_seconds(self, piece: str, pack: PackSpec) -> float:
        """Return the processor time of packing it; 0.0 where it is not packed."""
        whole, rates = self._of(piece, pack)
        return 0.0 if rates is None else whole / rates.pack_bytes_per_s

    def unpack_seconds(self, piece: str, pack: PackSpec) -> float:
        """Return the processor time of unpacking it; 0.0 where it is not packed."""
        whole, rates = self._of(piece, pack)
        return 0.0 if rates is None else whole / rates.unpack_bytes_per_s

    def _of(self, piece: str, pack: PackSpec) -> tuple[int, _Rates | None]:
        """Return what of a piece is packed, in bytes, and how; the lower halves of a split pack are not."""
        if piece == "weights" and WEIGHTS in self.packed:
            return pack.weight_bytes, _HALF if pack.split else _WIDE
        if piece == "states" and MOMENTS in self.packed:
            return pack.moments_bytes, _BOTH
        return 0, None


AS_THEY_ARE = OnDisk()
"""Nothing is packed."""
