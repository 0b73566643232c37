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

Sizes are relative to the largest and counted as [Note: count] says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK
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
    from numpy.typing import NDArray

    from megatrain_nb.codec.base import F32
    from megatrain_nb.codec.quantised.blocks import U16, U32

UNIT = 1 << 15
"""Sizes are added as integers, 0 to this for the largest: in any order alike."""
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
        unit = np.divide(np.float32(1), top, where=~zero, out=np.zeros_like(top))
        size = np.minimum(np.abs(m) * unit[:, None] + COUNT, COUNT + 1)
        count = (size.view(np.uint32) - COUNT.view(np.uint32)).astype(np.int32)
        per_step, width, least = self._steps(count)
        part = m_dither(noise) * width[:, None] + (least - COUNT * per_step)[:, None]
        place = size * per_step[:, None] + part
        place = np.minimum(place, COUNT + np.float32(self.levels))
        codes = place.astype(np.int32) - int(COUNT)
        # Counted in UNITs: sum(c x) / sum(c c), all integers below 2**24.
        along, square = (codes * count).sum(1), np.maximum((codes * codes).sum(1), 1)
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

    def _steps(self, count: NDArray[np.int32]) -> tuple[F32, F32, F32]:
        """Return for each block steps in a size, the dither's width, and its least.

        The least is for what is counted from `COUNT`, as size and dither are.
        """
        mean = count.sum(axis=1).astype(np.float32) * np.float32(self.mean_step())
        smallest = np.float32(self.mean_step())
        levels = np.float32(self.levels)  # so that the largest has the last code
        per_step = np.maximum(np.float32(1) / np.maximum(mean, smallest), levels)
        near = count * self.levels
        far = np.abs(near - (near + UNIT // 2 & -UNIT)).max(axis=1)
        exact = far <= self.levels  # a multiple of its codes already
        return (
            np.where(exact, levels, per_step),
            np.where(exact, np.float32(0), np.float32(self.width)),
            np.where(exact, COUNT + np.float32(0.5), np.float32(self.least())),
        )

    def mean_step(self) -> float:
        """Return the step of a block whose sizes add up to one of `UNIT`."""
        return self.step / (BLOCK * UNIT)

    def least(self) -> float:
        """Return what is added to a size of zero, counted from `COUNT`."""
        return float(COUNT) * (1 - self.width) + (1 - self.width) / 2

    def _root(self, v_codes: U32) -> F32:
        """Return the power of two, 1 or more, that evens m out."""
        octaves = v_codes << u4(self.shift - 23) >> u4(1)
        return ((octaves + u4(127)) << u4(23)).view(np.float32)
