"""Codecs chosen while a model is trained: measured in an update, decided when it is done.

[Note: when codecs change] In some updates (`is_looked_at`) every parameter whose codec is ``"dynamic"`` gets a
look: of some of its blocks, evenly spread, the new moments are computed beside the kernel, before they are
rounded, and the error that each codec would make in AdamW's direction is measured. When all that was due is
done, `megatrain_nb.codec.dynamic.choose` decides, and the moments are converted. Sample and errors depend on
the numbers alone, so the choice is the same whatever stays in RAM and however packs are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_nb.codec.base import BLOCK, Key, get
from megatrain_nb.codec.dynamic import Part, Role, choose, direction_error
from megatrain_nb.codec.quantised.blocks import BlockCodec
from megatrain_nb.codec.split import Split, join

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from megatrain_nb.codec.kernels import Floats
    from megatrain_nb.optim.encoded import EncodedSegment

    F32 = NDArray[np.float32]

FIRST_LOOK, LOOK_EVERY = 10, 100
"""The first update that is looked at, when averages have begun to fill, and then every so many."""
SAMPLE_BLOCKS = 16
"""Of each parameter: 2048 elements tell an error to some hundredths of itself."""


def is_looked_at(step: int) -> bool:
    """Whether codecs are measured in a step's update; the first step is 1.

    Examples
    --------
    >>> [step for step in range(1, 301) if is_looked_at(step)]
    [10, 100, 200, 300]
    """
    return step == FIRST_LOOK or step % LOOK_EVERY == 0


@dataclass(slots=True)
class _Sample:
    """Blocks of a parameter's new moments, by their number; None where they are still to come."""

    numel: int
    blocks: dict[int, tuple[F32, F32] | None] = field(default_factory=dict)


class Chooser:
    """Measures and chooses.

    Attributes
    ----------
    looking
        Whether the update that is due is looked at.
    """

    def __init__(self) -> None:
        self.looking = False
        self._samples: dict[str, _Sample] = {}
        self._parts: dict[str, Part] = {}

    def begin(self, numels: Mapping[str, int]) -> None:
        """Look at the update that begins, of these parameters: their elements by name."""
        self.looking = True
        self._parts.clear()
        self._samples = {
            name: _Sample(numel, dict.fromkeys(sampled_blocks(numel)))
            for name, numel in numels.items()
        }

    def look(
        self,
        segment: EncodedSegment,
        param: Floats,
        grad: F32,
        grad_scale: float,
    ) -> None:
        """Measure what lies in one segment, before it is updated."""
        sample = self._samples.get(segment.name)
        if sample is None:
            return
        start = segment.first // BLOCK
        stop = start + (segment.stop - segment.start) // BLOCK
        for block in sample.blocks:
            if start <= block < stop:
                place = segment.start + (block - start) * BLOCK
                part = slice(place, place + BLOCK)
                sample.blocks[block] = _new_moments(
                    segment,
                    block - start,
                    _numbers(param, part),
                    grad[part],
                    grad_scale,
                )
        if all(found is not None for found in sample.blocks.values()):
            self._measure(segment, sample)
            del self._samples[segment.name]

    def decide(self, codecs: Mapping[str, str]) -> dict[str, str]:
        """Return the codecs to change, by parameter name; the look is over.

        Parameters
        ----------
        codecs
            Those of now.
        """
        parts = [self._parts[name] for name in sorted(self._parts)]
        self.forget()
        chosen = choose(parts, previous=codecs) if parts else {}
        return {name: codec for name, codec in chosen.items() if codec != codecs[name]}

    def forget(self) -> None:
        """Look no more."""
        self.looking = False
        self._samples.clear()
        self._parts.clear()

    def _measure(self, segment: EncodedSegment, sample: _Sample) -> None:
        found = [both for both in sample.blocks.values() if both is not None]
        m, v = (np.concatenate(each) for each in zip(*found, strict=True))
        key = Key(0, segment.step, segment.seed)
        eps = segment.config.eps
        errors = {
            name: direction_error(get(name), m, v, key, eps=eps)
            for name in Role.BODY.codecs
        }
        self._parts[segment.name] = Part(
            name=segment.name, numel=sample.numel, role=Role.BODY, errors=errors
        )


def sampled_blocks(numel: int) -> list[int]:
    """Return the numbers of the blocks of a parameter that are looked at: whole ones, evenly spread.

    Examples
    --------
    >>> sampled_blocks(4100)[:4], len(sampled_blocks(10**6))
    ([0, 2, 4, 6], 16)
    """
    whole = numel // BLOCK
    count = min(whole, SAMPLE_BLOCKS)
    return [index * whole // count for index in range(count)]


def _new_moments(
    segment: EncodedSegment, row: int, param: F32, grad: F32, grad_scale: float
) -> tuple[F32, F32]:
    """Return a block's moments after the update, not rounded by a codec."""
    x = segment.config.scalars(segment.step, grad_scale)
    m, v = np.empty((2, BLOCK), np.float32)
    codec = segment.codec
    assert isinstance(codec, BlockCodec)
    planes = codec.planes(segment.encoded).rows(slice(row, row + 1))
    one = np.concatenate([plane.ravel().view(np.uint8) for plane in planes])
    codec.decode(one, m, v)
    g = grad * x.grad_scale
    if x.coupled:
        g = g + param * x.l2
    beta1 = np.float32(segment.config.beta1)
    m = beta1 * m + (np.float32(1) - beta1) * g
    v = x.beta2 * v + x.one_minus_beta2 * g * g
    return m, v


def _numbers(param: Any, part: slice) -> F32:
    """Return some fp32 numbers of an array or of a `Split`."""
    values = np.empty(part.stop - part.start, np.float32)
    if isinstance(param, Split):
        join(param.part(part), values)
    else:
        values[:] = param[part]
    return values
