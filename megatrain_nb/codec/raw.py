"""Both moments as they are: fp32, 64 bits for each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.codec.base import Codec

if TYPE_CHECKING:
    from megatrain_nb.codec.base import F32, U8, Key


class Raw(Codec):
    """`exp_avg`, then `exp_avg_sq`, little endian; every bit is kept, of NaN too."""

    name = "raw"

    def encoded_bytes(self, numel: int) -> int:
        """Return 8 bytes for each element."""
        return 8 * numel

    def _blank(self, out: U8) -> None:
        out.fill(0)

    def _encode(self, exp_avg: F32, exp_avg_sq: F32, out: U8, key: Key) -> None:
        size = 4 * exp_avg.size
        out[:size] = exp_avg.view(np.uint8)
        out[size:] = exp_avg_sq.view(np.uint8)

    def _decode(self, encoded: U8, exp_avg: F32, exp_avg_sq: F32) -> None:
        size = 4 * exp_avg.size
        exp_avg.view(np.uint8)[:] = encoded[:size]
        exp_avg_sq.view(np.uint8)[:] = encoded[size:]


CODEC = Raw()
