"""fp32 numbers as two 16-bit halves, in torch and so on any device; the rule is that of [Note: split]."""

from __future__ import annotations

import torch
from torch import Tensor

_SIGNLESS, _INFINITY = 0x7FFFFFFF, 0x7F800000
# Where NaNs are that would look like an infinity, and where their halves put them.
_ODD_NAN, _ODD_PLACE = 0x7F808000, 0x7FFF8000


def join_halves(hi: Tensor, lo: Tensor) -> Tensor:
    """Return the numbers that have these halves, bit for bit.

    Parameters
    ----------
    hi, lo : bfloat16, shape (N,)
        Of ``lo`` only the bits mean something.

    Returns
    -------
    Tensor : float32, shape (N,)
    """
    upper, lower = (x.view(torch.int16).to(torch.int32) for x in (hi, lo))
    upper = upper << 16
    bits = upper + lower
    odd = (bits & _SIGNLESS) >= _ODD_PLACE
    bits = torch.where(odd, bits - (_ODD_PLACE - _ODD_NAN), bits)
    is_nan = (upper & _SIGNLESS) > _INFINITY
    bits = torch.where(is_nan, upper | (lower & 0xFFFF), bits)
    return bits.view(torch.float32)


def split_halves(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Write the halves of every number.

    Parameters
    ----------
    master : float32, shape (N,)
        Only read.
    hi, lo : bfloat16, shape (N,)
        Overwritten; ``lo`` by bits that mean no number.
    """
    bits = master.view(torch.int32)
    size = bits & _SIGNLESS
    odd = (size >= _ODD_NAN) & (size < _ODD_NAN + 0x8000)
    up = torch.where(size > _INFINITY, 0, 0x8000).to(torch.int32)
    up = torch.where(odd, _ODD_PLACE + 0x8000 - _ODD_NAN, up)
    # Shifts of signed numbers, so that what is left fits into 16 bits.
    hi.view(torch.int16).copy_((bits + up) >> 16)
    lo.view(torch.int16).copy_((bits << 16) >> 16)
