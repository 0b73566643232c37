"""m in equal steps, as 8 and 4 bits have it.

Codes are signed, with one zero in the middle and the same number of steps on both sides.
The step is the block's largest magnitude over that number, rounded down to bf16: so the
largest element always gets the outermost code (and encoding again finds the same step),
and nothing decodes to more than the largest. Rounding is without bias, except that up to
0.8 % are cut from the largest element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy import uint32 as u4

from megatrain_nb.codec.quantised.blocks import (
    COUNT,
    SMALLEST_SCALE,
    BlockCodec,
    bf16_down,
    from_bf16,
    largest,
    m_dither,
)

if TYPE_CHECKING:
    from megatrain_nb.codec.base import F32
    from megatrain_nb.codec.quantised.blocks import U16, U32


class Linear(BlockCodec):
    """A `BlockCodec` whose m is stored in equal steps."""

    def quantise_m(self, m: F32, v_codes: U32, noise: U32) -> tuple[U32, U16]:
        """Round to one of the two neighbours; v does not matter."""
        steps = self._steps()
        scale = bf16_down(largest(m) / np.float32(steps))
        step = from_bf16(scale)
        step[step < SMALLEST_SCALE] = 0
        inverse = np.divide(
            np.float32(1), step, where=step > 0, out=np.zeros_like(step)
        )
        place = m * inverse[:, None] + (m_dither(noise) + np.float32(steps + 1))
        place = np.clip(place, COUNT + 1, COUNT + np.float32(2 * steps + 1))
        codes = place.astype(np.uint32) - u4(COUNT)
        return codes, np.where(step > 0, scale, 0).astype(np.uint16)

    def restore_m(self, codes: U32, scale: U16, v_codes: U32) -> F32:
        """Count the steps."""
        count = codes.astype(np.float32) - np.float32(self._steps() + 1)
        return count * from_bf16(scale)[:, None]

    def _steps(self) -> int:
        return (1 << (self.bits - 1)) - 1
