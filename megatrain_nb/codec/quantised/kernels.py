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
from megatrain_nb.jit import INLINED, SPLICED

if TYPE_CHECKING:
    from megatrain_nb.codec.quantised.block_kernels import BlockKernels, Scratch
    from megatrain_nb.codec.quantised.blocks import Planes

_KERNELS = {
    Planes8: linear_kernels(EIGHT),
    Planes4: linear_kernels(FOUR),
    Planes3: projected_kernels(THREE),
    Planes2: projected_kernels(TWO),
}


def begin_decode(planes: Planes, b: np.uintp) -> Any:
    """Return what `decode` needs of block b."""
    return _KERNELS[type(planes)].begin_decode(planes, b)


def decode(planes: Planes, b: np.uintp, header: Any, i: int, k: int) -> Any:
    """Return m and v of element i + 16 k."""
    return _KERNELS[type(planes)].decode(planes, b, header, i, k)


def level_of(planes: Planes, v: np.float32, noise: np.uint32, odd: bool) -> np.uint32:
    """Return what stands for v, which may be NaN if ``odd``, until the codes are known."""
    return np.uint32(_KERNELS[type(planes)].level_of(v, noise, odd))


def put_levels(planes: Planes, s: Scratch, i: int, levels: Any) -> None:
    """Put the levels of a lane's eight elements."""
    _KERNELS[type(planes)].put_levels(s, i, levels)


def cut_levels(planes: Planes, s: Scratch, size: int) -> None:
    """Make zeros of the levels behind a parameter's end."""
    _KERNELS[type(planes)].cut_levels(s, size)


def size_of(planes: Planes, m: np.float32) -> np.uint32:
    """Return what `begin_encode` needs the largest of: the magnitude, or nothing."""
    return np.uint32(_KERNELS[type(planes)].size_of(m))


def _stage(name: str) -> Any:
    """Return a stage of encoding block b: what it needs of the stages before is in the scratch.

    The first, `begin_encode`, needs m, the levels, the hashes, and the largest of both.
    """

    def run(planes: Planes, b: np.uintp, s: Scratch) -> None:
        getattr(_KERNELS[type(planes)], name)(planes, b, s)

    def compiled(planes: Any, b: Any, s: Any) -> Any:
        return getattr(_kernels_of(planes), name)

    overload(run, strict=False, inline=SPLICED)(compiled)
    return run


def _kernels_of(planes: Any) -> BlockKernels:
    return _KERNELS[planes.instance_class]


@overload(begin_decode, strict=False, jit_options=INLINED)
def _begin_decode(planes: Any, b: Any) -> Any:
    run = _kernels_of(planes).begin_decode
    return lambda planes, b: run(planes, b)


@overload(decode, strict=False, jit_options=INLINED)
def _decode(planes: Any, b: Any, header: Any, i: Any, k: Any) -> Any:
    run = _kernels_of(planes).decode
    return lambda planes, b, header, i, k: run(planes, b, header, i, k)


@overload(level_of, strict=False, jit_options=INLINED)
def _level_of(planes: Any, v: Any, noise: Any, odd: Any) -> Any:
    run = _kernels_of(planes).level_of
    return lambda planes, v, noise, odd: run(v, noise, odd)


@overload(put_levels, strict=False, jit_options=INLINED)
def _put_levels(planes: Any, s: Any, i: Any, levels: Any) -> Any:
    run = _kernels_of(planes).put_levels
    return lambda planes, s, i, levels: run(s, i, levels)


@overload(cut_levels, strict=False, jit_options=INLINED)
def _cut_levels(planes: Any, s: Any, size: Any) -> Any:
    run = _kernels_of(planes).cut_levels
    return lambda planes, s, size: run(s, size)


@overload(size_of, strict=False, jit_options=INLINED)
def _size_of(planes: Any, m: Any) -> Any:
    run = _kernels_of(planes).size_of
    return lambda planes, m: run(m)


begin_encode, encode = _stage("begin_encode"), _stage("encode")
begin_measure, measure = _stage("begin_measure"), _stage("measure")
begin_rest, encode_rest = _stage("begin_rest"), _stage("encode_rest")
finish = _stage("finish")
