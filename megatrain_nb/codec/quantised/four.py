"""4 bits for each moment."""

from __future__ import annotations

from megatrain_nb.codec.quantised.linear import Linear


class FourBit(Linear):
    """m in 7 equal steps each way; v as a power of two.

    v spans 15 octaves in a block. 8.2 bits for each parameter.

    References
    ----------
    Li, Chen and Zhu, arXiv 2309.01507: 4-bit states, and why v must not have a zero.
    """

    name = "4bit"
    bits = 4
    shift = 23


CODEC = FourBit()
