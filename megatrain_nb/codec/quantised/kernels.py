"""The compiled codecs by the class of their planes; importing this imports numba."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba.extending import overload

from megatrain_nb.codec.quantised.blocks import Planes2, Planes3, Planes4, Planes8
from megatrain_nb.codec.quantised.eight import CODEC as EIGHT
from megatrain_nb.codec.quantised.four import CODEC as FOUR
from megatrain_nb.codec.quantised.linear_kernels import linear_kernels
from megatrain_nb.codec.quantised.projected_kernels import projected_kernels
from megatrain_nb.codec.quantised.three import CODEC as THREE
from megatrain_nb.codec.quantised.two import CODEC as TWO

if TYPE_CHECKING:
    from megatrain_nb.codec.quantised.block_kernels import BlockKernels, Scratch
    from megatrain_nb.codec.quantised.blocks import Planes

_KERNELS = {
    Planes8: linear_kernels(EIGHT),
    Planes4: linear_kernels(FOUR),
    Planes3: projected_kernels(THREE),
    Planes2: projected_kernels(TWO),
}


def begin_decode(planes: Planes, b: int, s: Scratch) -> Any:
    """Prepare block b; return what `decode` needs of it."""
    return _KERNELS[type(planes)].begin_decode(planes, b, s)


def decode(planes: Planes, b: int, s: Scratch, header: Any, i: int) -> Any:
    """Return m of elements i and i + 64, then v of both."""
    return _KERNELS[type(planes)].decode(planes, b, s, header, i)


def level_of(planes: Planes, v: np.float32, noise: np.uint32) -> np.uint32:
    """Return what stands for v until the codes are known."""
    return np.uint32(_KERNELS[type(planes)].level_of(v, noise))


def begin_encode(planes: Planes, b: int, s: Scratch, largest: np.uint32) -> Any:
    """Return what `encode` needs; ``largest`` is of all `magnitude` of m."""
    return _KERNELS[type(planes)].begin_encode(planes, b, s, largest)


def encode(planes: Planes, b: int, s: Scratch, state: Any, i: int) -> Any:
    """Encode what other elements do not change, for i and i + 64 in the scratch.

    Returns a number, whose maximum over all i `end_encode` needs.
    """
    return _KERNELS[type(planes)].encode(planes, b, s, state, i)


def end_encode(planes: Planes, b: int, s: Scratch, largest: Any) -> None:
    """Encode the rest of block b."""
    _KERNELS[type(planes)].end_encode(planes, b, s, largest)


def _kernels_of(planes: Any) -> BlockKernels:
    return _KERNELS[planes.instance_class]


@overload(begin_decode, strict=False)
def _begin_decode(planes: Any, b: Any, s: Any) -> Any:
    run = _kernels_of(planes).begin_decode
    return lambda planes, b, s: run(planes, b, s)


@overload(decode, strict=False)
def _decode(planes: Any, b: Any, s: Any, header: Any, i: Any) -> Any:
    run = _kernels_of(planes).decode
    return lambda planes, b, s, header, i: run(planes, b, s, header, i)


@overload(level_of, strict=False)
def _level_of(planes: Any, v: Any, noise: Any) -> Any:
    run = _kernels_of(planes).level_of
    return lambda planes, v, noise: run(v, noise)


@overload(begin_encode, strict=False)
def _begin_encode(planes: Any, b: Any, s: Any, largest: Any) -> Any:
    run = _kernels_of(planes).begin_encode
    return lambda planes, b, s, largest: run(planes, b, s, largest)


@overload(encode, strict=False)
def _encode(planes: Any, b: Any, s: Any, state: Any, i: Any) -> Any:
    run = _kernels_of(planes).encode
    return lambda planes, b, s, state, i: run(planes, b, s, state, i)


@overload(end_encode, strict=False)
def _end_encode(planes: Any, b: Any, s: Any, largest: Any) -> Any:
    run = _kernels_of(planes).end_encode
    return lambda planes, b, s, largest: run(planes, b, s, largest)
