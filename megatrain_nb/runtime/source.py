"""Where a streamed tensor's values are: one parameter's part of a pack's pieces.

[Note: who writes to a split parameter] A split parameter's fp32 numbers are its two halves together (see
`megatrain_nb.codec.split`). The model, and whoever holds the parameter, see the bf16 half. A write into it
says nothing of the lower half: where the bf16 value changed, the number becomes that value (a lower half of
zero); elsewhere it stays as exact as it was. `MasterSource` shows the numbers themselves, fp32.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from megatrain_nb.codec.base import Key
from megatrain_nb.codec.split import Split, join, split
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.lanes import tensor_over
from megatrain_nb.runtime.layers import part_of
from megatrain_nb.runtime.piece import MOMENTS, What, master_of
from megatrain_nb.runtime.recode import Moments, decode, encode
from megatrain_nb.runtime.tensor import Source, StreamedTensor, streamed_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from megatrain_nb.plan.model import MomentPart
    from megatrain_nb.runtime.layers import Home
    from megatrain_nb.runtime.offload import OffloadedModel


class _PackSource:
    """Opens something of a usable model's pack; subclasses say what in ``_opened``."""

    def __init__(self, offloaded: OffloadedModel, home: Home) -> None:
        self._offloaded = offloaded
        self._home = home

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[Tensor]:
        """Give a plain tensor over the values for a moment; it is not interrupted half-way."""
        with self._usable(), self._opened(write=write) as values:
            yield values

    def _usable(self) -> AbstractContextManager[None]:
        executor = self._offloaded.executor
        executor.check_usable()
        return interrupts_wait(executor.stop, breakable=False)

    def _opened(self, *, write: bool) -> AbstractContextManager[Tensor]:
        raise NotImplementedError


class PieceSource(_PackSource):
    """One parameter's weights as they compute, or its gradient or a moment."""

    def __init__(
        self, offloaded: OffloadedModel, param: nn.Parameter, home: Home, what: What
    ) -> None:
        self.name = (
            home.spec.name
            if what is What.WEIGHTS
            else f"{what.value} of {home.spec.name}"
        )
        super().__init__(offloaded, home)
        self._param = param
        self._what = what

    @contextmanager
    def _opened(self, *, write: bool) -> Iterator[Tensor]:
        offloaded, pack = self._offloaded, self._home.pack
        offloaded.executor.tail.show(pack.index, self._what)
        if write:
            offloaded.executor.tail.leave(pack.index)
        if write or self._what is not What.GRADS:
            offloaded.finish_update(pack.index)
        changes = write and self._what is What.WEIGHTS
        if changes:
            offloaded.executor.weights_change()
        zeroes = (
            changes
            and pack.split
            and not offloaded.pager.is_blank(pack.index, What.LOW)
        )
        kinds = master_of(pack) if zeroes else (self._what,)
        with offloaded.pager.opened(pack.index, *kinds, write=write) as arrays:
            values = part_of(tensor_over(arrays[0]), self._home)
            if zeroes:
                halves = _halves(arrays, self._home)
                before = halves.hi.copy()
                try:
                    yield values
                finally:
                    halves.lo[halves.hi != before] = 0
                return
            yield values
            if write and self._what is What.GRADS:
                offloaded.executor.norms[self._param] = torch.linalg.vector_norm(values)

    @contextmanager
    def part(self, start: int, stop: int) -> Iterator[Tensor]:
        """Give elements ``start`` to ``stop`` for a moment, flat, to be read."""
        with self.opened(write=False) as values:
            yield values.view(-1)[start:stop]

    def master(self) -> Source:
        """Return where the parameter's fp32 values are."""
        if not self._home.pack.split:
            return self
        return MasterSource(self._offloaded, self._home)

    def grad(self) -> StreamedTensor | None:
        """Return the pending gradient of a parameter, or None."""
        if self._param not in self._offloaded.executor.norms:
            return None
        source = PieceSource(self._offloaded, self._param, self._home, What.GRADS)
        return streamed_tensor(
            source, self._home.spec.shape, torch.float32, self._offloaded.device
        )

    def set_grad(self, value: Tensor | None) -> None:
        """Replace or drop the pending gradient."""
        if value is None:
            self._offloaded.executor.norms.pop(self._param, None)
            return
        with PieceSource(self._offloaded, self._param, self._home, What.GRADS).opened(
            write=True
        ) as values:
            values.copy_(value)


class MomentSource(PieceSource):
    """One of a parameter's moments, as fp32; encoded ones are decoded for a moment, and what was written encoded.

    Both moments of a parameter are encoded together, so a write into one rounds the other again: with 8 and 4
    bits to what it is, with 3 and 2 bits, whose `exp_avg` is relative to `exp_avg_sq`, to something near it.
    """

    @contextmanager
    def _opened(self, *, write: bool) -> Iterator[Tensor]:
        offloaded, spec = self._offloaded, self._home.spec
        pack = offloaded.pager.packs[self._home.pack.index]
        if not pack.encoded:
            with super()._opened(write=write) as values:
                yield values
            return
        offloaded.finish_update(pack.index)
        mine = MOMENTS.index(self._what)
        with encoded_of(offloaded, self._home, write=write) as (parts, key):
            flat = np.empty(spec.numel, np.float32)
            for part, data, place in parts:
                decode(part, data, _beside(flat[place], mine))
            yield torch.from_numpy(flat).view(spec.shape)
            if not write:
                return
            for part, data, place in parts:
                moments = _beside(np.empty(part.stop - part.start, np.float32), mine)
                decode(part, data, moments)
                moments[mine][:] = flat[place]
                encode(part, moments, data, key)


@contextmanager
def encoded_of(
    offloaded: OffloadedModel, home: Home, *, write: bool
) -> Iterator[tuple[list[tuple[MomentPart, Any, slice]], Key]]:
    """Give the encoded moments of a parameter for a moment, and the key of their rounding.

    They come as parts, each with its tile's bytes and its place in the parameter.
    """
    pager = offloaded.pager
    pack = pager.packs[home.pack.index]
    with pager.opened(pack.index, What.ENCODED, write=write) as [data]:
        found = []
        for start, stop in pack.tiles(pager.tile_numel):
            first, end = pack.encoded_span(start, stop)
            for part in pack.moment_parts(start, stop):
                if part.param.name == home.spec.name:
                    offset = part.param.offset
                    place = slice(part.start - offset, part.stop - offset)
                    found.append((part, data[first:end], place))
        yield found, Key(0, *offloaded.adam.rounding_of(home.spec.name))


def _beside(values: Any, mine: int) -> Moments:
    """Return room for both moments of a part, of which one is given."""
    other = np.empty_like(values)
    return Moments(values, other) if mine == 0 else Moments(other, values)


class MasterSource(_PackSource):
    """The fp32 numbers of a split parameter, joined for a moment; what was written is split again."""

    def __init__(self, offloaded: OffloadedModel, home: Home) -> None:
        super().__init__(offloaded, home)
        self.name = home.spec.name

    @contextmanager
    def _opened(self, *, write: bool) -> Iterator[Tensor]:
        with self._both_halves(write=write) as halves:
            values = np.empty(self._home.spec.numel, np.float32)
            join(halves, values)
            yield torch.from_numpy(values).view(self._home.spec.shape)
            if write:
                split(values, halves)

    @contextmanager
    def part(self, start: int, stop: int) -> Iterator[Tensor]:
        """Give elements ``start`` to ``stop`` for a moment, flat, to be read."""
        with self._usable(), self._both_halves(write=False) as halves:
            values = np.empty(stop - start, np.float32)
            join(halves.part(slice(start, stop)), values)
            yield torch.from_numpy(values)

    @contextmanager
    def _both_halves(self, *, write: bool) -> Iterator[Split]:
        offloaded, pack = self._offloaded, self._home.pack
        offloaded.executor.tail.show(pack.index, *master_of(pack))
        if write:
            offloaded.executor.tail.leave(pack.index)
        offloaded.finish_update(pack.index)
        if write:
            offloaded.executor.weights_change()
        with offloaded.pager.opened(
            pack.index, *master_of(pack), write=write
        ) as arrays:
            yield _halves(arrays, self._home)

    def grad(self) -> None:
        """Return none: it is never trained through this source."""

    def set_grad(self, value: Tensor | None) -> None:
        """Do nothing: it is never trained through this source."""


def _halves(arrays: list[Any], home: Home) -> Split:
    part = slice(home.spec.offset, home.spec.offset + home.spec.numel)
    return Split(arrays[0][part], arrays[1][part])
