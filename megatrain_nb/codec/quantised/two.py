"""2 bits for each moment."""

from __future__ import annotations

from megatrain_nb.codec.quantised.projected import Projected


class TwoBit(Projected):
    """m as sign or zero, relative to the root of v; v as a power of four.

    v spans 6 octaves in a block. 4.2 bits for each parameter.

    References
    ----------
    Xu et al., arXiv 2505.00347, as for 3 bits; they lower beta1 at 2 bits, which the
    projection makes unnecessary.
    """

    name = "2bit"
    bits = 2
    shift = 24
    levels = 1
    step = 1.54
    width = 0.3


CODEC = TwoBit()
