"""Where the bytes of each block are, at a moment and over a step, from what the pager tells.

[Note: residency and what is in flight] A piece counts as in RAM from the moment when all of it has landed
until it gives its memory back; before that it *arrives*, and afterwards, until its writes are done, it
*leaves*. What arrives or leaves is drawn apart and counts for no tier. Tiles that only the update reads and
writes pass through RAM without staying: they count in the traffic, not in the residency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.plan.layout import GROUPS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain_nb.plan.layout import Layout
    from megatrain_nb.plan.timeline import Span

_DEVICE = len(GROUPS)  # the row of weights on a device, after those in RAM


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Where each block's bytes are at one moment.

    Attributes
    ----------
    in_ram, arriving, leaving : float64, shape (3, blocks)
        Bytes of weights, gradients and states: in RAM; on their way from the disk; on their way to it.
    on_device : bool, shape (blocks,)
        Whether the block's weights are on the device.
    computing
        Index of the block that computes and ``FORWARD`` or ``BACKWARD``; None if none does.
    """

    in_ram: NDArray[np.float64]
    arriving: NDArray[np.float64]
    leaving: NDArray[np.float64]
    on_device: NDArray[np.bool_]
    computing: tuple[int, str] | None


class Residency:
    """The pieces of one model.

    Parameters
    ----------
    layout
        The model; None for one without blocks.
    now_s
        The time; spans are on the same clock.

    Notes
    -----
    Not thread-safe: whoever folds spans holds a lock.
    """

    def __init__(self, layout: Layout | None, now_s: float) -> None:
        self.num_blocks = len(layout.blocks) if layout is not None else 0
        self._layout = layout
        cells = (len(GROUPS) + 1) * self.num_blocks
        self._bytes = [0.0] * cells  # in RAM by group and block, then on the device
        self._area = [0.0] * cells  # byte-seconds since `take_shares`
        self._touched_s = [now_s] * cells
        self._since_s = now_s
        self._places: dict[str, tuple[int, int] | None] = {}
        self._sizes: dict[str, int] = {}
        self._landed: set[str] = set()
        self._arriving: dict[str, int] = {}  # bytes still to come
        self._leaving: dict[str, int] = {}  # bytes still to go
        self._arriving_bytes = [0.0] * (len(GROUPS) * self.num_blocks)
        self._leaving_bytes = [0.0] * (len(GROUPS) * self.num_blocks)
        if layout is not None:
            self._sizes = {piece.key: piece.num_bytes for piece in layout.pieces}
            for piece in layout.pieces:
                if piece.in_ram:
                    self._land(piece.key, now_s)

    # -- what the pager tells ----------------------------------------------------------------------------

    def enter(self, span: Span) -> None:
        """Note that a piece has RAM from now on."""
        place = self._place(span.name)
        if place is None:
            return
        if span.num_bytes:
            self._arriving[span.name] = span.num_bytes
            self._arriving_bytes[place[0]] += place[1]
        else:
            self._land(span.name, span.end_s)

    def read(self, span: Span) -> None:
        """Note that a tile has come."""
        key = span.name.rpartition("/")[0]
        if key in self._arriving:
            self._arriving[key] -= span.num_bytes
            if self._arriving[key] <= 0:
                self._land(key, span.end_s)

    def needed(self, span: Span) -> None:
        """Note that a piece is there, because it was waited for."""
        if span.name in self._arriving:
            self._land(span.name, span.end_s)

    def leave(self, span: Span) -> None:
        """Note that a piece has no RAM any more."""
        place = self._place(span.name)
        if place is None:
            return
        cell, size = place
        if self._arriving.pop(span.name, None) is not None:
            self._arriving_bytes[cell] -= size
        if span.name in self._landed:
            self._landed.remove(span.name)
            self._change(cell, -size, span.end_s)
        if span.num_bytes:
            before = self._leaving.get(span.name, 0)
            self._leaving[span.name] = span.num_bytes
            self._leaving_bytes[cell] += span.num_bytes - before

    def written(self, span: Span) -> None:
        """Note that a tile has gone."""
        key = span.name.rpartition("/")[0]
        left = self._leaving.get(key)
        place = self._place(key)
        if left is None or place is None:
            return
        done = min(left, span.num_bytes)
        self._leaving_bytes[place[0]] -= done
        self._leaving[key] = left - done
        if left == done:
            del self._leaving[key]

    def set_device(self, block: int, now_s: float, *, there: bool) -> None:
        """Note whether a block's weights are on the device."""
        cell = _DEVICE * self.num_blocks + block
        change = there - self._bytes[cell]  # 1 while it is there
        if change:
            self._change(cell, change, now_s)

    # -- what is asked ---------------------------------------------------------------------------------

    def block_of(self, key: str) -> int | None:
        """Return the block of a piece or tile, by its key; None for another model's."""
        place = self._place(key)
        return None if place is None else place[0] % self.num_blocks

    def now(self, computing: tuple[int, str] | None) -> Now:
        """Return where everything is."""
        blocks = self.num_blocks
        shape = (len(GROUPS), blocks)
        return Now(
            in_ram=np.array(self._bytes[: _DEVICE * blocks]).reshape(shape),
            arriving=np.array(self._arriving_bytes).reshape(shape),
            leaving=np.array(self._leaving_bytes).reshape(shape),
            on_device=np.array(self._bytes[_DEVICE * blocks :]) > 0,
            computing=computing,
        )

    def take_shares(
        self, now_s: float
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return how full RAM and device were since the last call.

        Returns
        -------
        in_ram : float32, shape (3, blocks)
            Mean share of the bytes of weights, gradients and states.
        on_device : float32, shape (blocks,)
            Share of the time in which the weights were there; empty where blocks compute in RAM.
        """
        for cell in range(len(self._bytes)):
            self._change(cell, 0.0, now_s)
        passed, self._since_s = max(now_s - self._since_s, 1e-9), now_s
        area = np.array(self._area, np.float64).reshape(_DEVICE + 1, self.num_blocks)
        self._area = [0.0] * len(self._area)
        if self._layout is None:
            return area[:_DEVICE].astype(np.float32), np.zeros(0, np.float32)
        whole = np.array(self._layout.num_bytes(), np.float64)
        in_ram = area[:_DEVICE] / np.maximum(whole, 1.0) / passed
        on_device = np.zeros(0) if self._layout.in_place else area[_DEVICE] / passed
        return (
            np.clip(in_ram, 0, 1).astype(np.float32),
            np.clip(on_device, 0, 1).astype(np.float32),
        )

    # -- inside ----------------------------------------------------------------------------------------

    def _place(self, key: str) -> tuple[int, int] | None:
        """Return the cell of a piece and the bytes of it; None for another model's."""
        if key in self._places:
            return self._places[key]
        place = None
        layout = self._layout
        if layout is not None and key.startswith(f"{layout.model}/"):
            group, block = layout.cell_of(key)
            cell = group * self.num_blocks + block
            place = cell, self._sizes.get(key, 0)
        self._places[key] = place
        return place

    def _land(self, key: str, now_s: float) -> None:
        place = self._place(key)
        if place is None or key in self._landed:
            return
        if self._arriving.pop(key, None) is not None:
            self._arriving_bytes[place[0]] -= place[1]
        self._landed.add(key)
        self._change(place[0], place[1], now_s)

    def _change(self, cell: int, change: float, now_s: float) -> None:
        passed = max(0.0, now_s - self._touched_s[cell])
        self._area[cell] += self._bytes[cell] * passed
        self._touched_s[cell] = now_s
        self._bytes[cell] += change
