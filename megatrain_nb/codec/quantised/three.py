"""3 bits for each moment."""

from __future__ import annotations

from megatrain_nb.codec.quantised.projected import Projected


class ThreeBit(Projected):
    """m in 3 levels each way, relative to the root of v; v as a power of two.

    v spans 7 octaves in a block. 6.2 bits for each parameter.

    References
    ----------
    Xu et al., arXiv 2505.00347: v in 2 and 3 bits needs logarithmic levels and
    stochastic rounding.
    """

    name = "3bit"
    bits = 3
    shift = 23
    levels = 3
    step = 0.81
    width = 0.5


CODEC = ThreeBit()
