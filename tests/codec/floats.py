"""Floats that pack as moments and weights do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16] | NDArray[np.uint32]


def smooth(count: int, item_bytes: int = 4, *, signed: bool = True) -> Bits:
    """Floats whose exponents take few values, as those of moments; the same everywhere."""
    i = np.arange(count, dtype=np.uint64)
    noise = i * 2654435761 >> 7 & 0xFFFFFFFF
    exponent = 110 + (i * 40503 >> 4) % 5
    sign = (noise >> 5 & 1) if signed else np.zeros_like(i)
    bits = sign << 31 | exponent << 23 | noise & 0x7FFFFF
    if item_bytes == 2:
        return (bits >> 16).astype(np.uint16)
    return bits.astype(np.uint32)
