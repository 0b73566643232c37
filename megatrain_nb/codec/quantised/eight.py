"""8 bits for each moment."""

from __future__ import annotations

from megatrain_nb.codec.quantised.linear import Linear


class EightBit(Linear):
    """m in 127 equal steps each way; v as a float with 3 bits behind the exponent.

    v spans 32 octaves in a block, in steps of 6 to 12 %. 16.2 bits for each parameter.

    References
    ----------
    Dettmers et al., arXiv 2110.02861, store both in 8 bits with nearest rounding and a
    zero in v; the zero and the rounding differ here, see [Note: v].
    """

    name = "8bit"
    bits = 8
    shift = 20


CODEC = EightBit()
