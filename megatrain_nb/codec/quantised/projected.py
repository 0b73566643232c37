"""m in few levels, relative to the root of v, as 3 and 2 bits have it.

With so few levels the elements of a block must be alike, and m / sqrt(v) is: gradients
differ in size between elements, and both moments follow. The root is rounded to a power
of two, so that multiplying and dividing by it loses nothing.

Rounding without bias is out of reach here: its noise adds more to the energy of m than
the decay takes (beta1**2 * (1 + noise / signal) > 1), and m grows without gradients.
So codes are chosen by nearness, with a dither of part of a step, and then the scale
that fits them best is taken: the projection of the block on its codes. A projection is
never longer than what is projected, whatever the codes.

A block that is an exact multiple of its codes is left as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.quantised.blocks import (
    SMALLEST_SCALE,
    BlockCodec,
    bf16_down,
    from_bf16,
    largest,
    m_noise,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain_nb.codec.base import F32
    from megatrain_nb.codec.quantised.blocks import U16, U32

UNIT = 1 << 16
"""Magnitudes are integers, 0 to this for the largest: sums in any order are equal."""
SLACK = np.float32(1 + 2.0**-14)
"""Before rounding down to bf16: the integers' rounding must not cost one more."""


class Projected(BlockCodec):
    """A `BlockCodec` whose m is a few levels times a projected scale.

    Attributes
    ----------
    levels
        Each way; 1 is signs and zeros.
    step
        Between levels, over the block's mean magnitude.
    width
        Of the dither, over a step.
    """

    levels: ClassVar[int]
    step: ClassVar[float]
    width: ClassVar[float]

    def quantise_m(self, m: F32, v_codes: U32, noise: U32) -> tuple[U32, U16]:
        """Choose codes by nearness, and the scale by projection."""
        m = m * self._root(v_codes)
        top = largest(m)
        zero = top < SMALLEST_SCALE
        unit = np.divide(np.float32(UNIT), top, where=~zero, out=np.zeros_like(top))
        size = np.minimum(np.abs(m) * unit[:, None] + np.float32(0.5), UNIT)
        size = size.astype(np.int32)
        per_step, exact = self._per_step(size)
        part = m_noise(noise).astype(np.float32) * np.float32(self.width / 256)
        part += np.float32((1 - self.width) / 2 + self.width / 512)
        part = np.where(exact[:, None], np.float32(0.5), part)
        place = size.astype(np.float32) * per_step[:, None] + part
        codes = np.minimum(place, np.float32(self.levels)).astype(np.int32)
        # Counted in UNITs: sum(c x) / sum(c c), all integers below 2**24.
        along, square = (codes * size).sum(1), np.maximum((codes * codes).sum(1), 1)
        share = along.astype(np.float32) / (square * UNIT).astype(np.float32)
        scale = top * share * SLACK
        scale[zero | (scale < SMALLEST_SCALE)] = 0
        signed = np.where(m < 0, -codes, codes) + self.levels
        signed[scale == 0] = self.levels
        return signed.astype(np.uint32), bf16_down(scale)

    def restore_m(self, codes: U32, scale: U16, v_codes: U32) -> F32:
        """Multiply level, scale and root."""
        level = codes.astype(np.float32) - np.float32(self.levels)
        return level * from_bf16(scale)[:, None] / self._root(v_codes)

    def _per_step(self, size: NDArray[np.int32]) -> tuple[F32, NDArray[np.bool_]]:
        """Return steps in one size unit, and which blocks are multiples already."""
        mean = size.sum(axis=1).astype(np.float32) * np.float32(self.step / BLOCK)
        least = np.float32(self.levels / UNIT)  # so that the largest has the last code
        per_step = np.maximum(np.float32(1) / np.maximum(mean, np.float32(1)), least)
        near = size * self.levels
        far = np.abs(near - (near + UNIT // 2 & -UNIT)).max(axis=1)
        exact = far <= self.levels
        return np.where(exact, least, per_step), exact

    def _root(self, v_codes: U32) -> F32:
        """Return the power of two, 1 or more, that evens m out."""
        octaves = v_codes << u4(self.shift - 23) >> u4(1)
        return ((octaves + u4(127)) << u4(23)).view(np.float32)
