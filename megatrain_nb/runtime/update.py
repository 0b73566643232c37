"""AdamW on tiles, just in time: a pack is updated when the next forward is about to need it.

[Note: an update is a debt] ``optimizer.step`` knows the gradients' norm and so the clip coefficient; it
notes what is to be done, and returns. While a block computes in the next forward, the gradients and
moments of the blocks after it are read; a block waits for its own update and for nothing else, so
nothing is stale: the numbers are those of an update done at once. Whoever looks at a weight, moment or
gradient in between pays the debt of its pack first. So the weights, read for the update, are there for
the forward as well, and the disk works while the device does.

Everything here runs on the training thread, between calls of blocks: where the device is the CPU, the
kernels and the matrix library never fight for the cores; where it is not, it computes meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from megatrain_nb.codec.base import get
from megatrain_nb.codec.split import Split
from megatrain_nb.optim.adamw import Segment, update
from megatrain_nb.optim.encoded import EncodedSegment, update_encoded
from megatrain_nb.plan.timeline import Span
from megatrain_nb.runtime.chooser import Chooser
from megatrain_nb.runtime.piece import What, states_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from megatrain_nb.optim.adamw import UpdateThreads
    from megatrain_nb.plan.model import PackSpec
    from megatrain_nb.runtime.pager import Pager
    from megatrain_nb.store.host import Slab


@dataclass(slots=True, eq=False)
class _Tile:
    """One range of a pack, and what was read of it; no segments while no update is due."""

    pack: int
    start: int
    stop: int
    segments: list[Segment] = field(default_factory=list)
    slabs: dict[What, Slab] = field(default_factory=dict)
    reading: dict[What, Future[None] | None] = field(default_factory=dict)


class Updates:
    """The updates that are due, by pack.

    Attributes
    ----------
    seconds
        Time that the kernels have taken so far.
    chooser
        Looks at updates whose codecs are dynamic.
    """

    def __init__(
        self, pager: Pager, *, threads: UpdateThreads, on_span: Callable[[Span], None]
    ) -> None:
        self.seconds = 0.0
        self.chooser = Chooser()
        self._pager = pager
        self._threads = threads
        self._on_span = on_span
        self._grad_scale = 1.0
        self._tiles = {
            pack.index: [
                _Tile(pack.index, start, stop)
                for start, stop in pack.tiles(pager.tile_numel)
            ]
            for pack in pager.packs
        }
        self._due: dict[int, deque[_Tile]] = {}
        self._ahead: dict[int, None] = {}
        self._unwanted: set[int] = set()
        self._current: _Tile | None = None
        pager.give_way = self._give_way
        pager.forget_tiles = self.rest
        pager.is_due = self.__contains__

    def __contains__(self, pack: int) -> bool:
        return pack in self._due

    def begin(
        self,
        segments: Mapping[int, Sequence[Segment]],
        *,
        grad_scale: float,
        order: Iterable[int],
    ) -> None:
        """Note one AdamW step as due; the debts of the one before are paid (`finish_all`).

        Parameters
        ----------
        segments
            By pack index: the parameters that have a gradient.
        grad_scale
            Clip coefficient.
        order
            Pack indices, in the order in which the next forward needs them; others follow.
        """
        assert not self._due
        self._grad_scale = grad_scale
        for pack in dict.fromkeys([*order, *segments]):
            due: deque[_Tile] = deque()
            for tile in self._tiles[pack]:
                tile.segments = _clip(segments.get(pack, ()), tile.start, tile.stop)
                if tile.segments:
                    due.append(tile)
                else:
                    self._give_tile_back(tile)
            if due:
                self._due[pack] = due
        for pack in self._ahead.keys() - self._due.keys():
            self._give_back(pack)

    def read_ahead(self, pack: int) -> None:
        """Start to read what the update of a pack needs, as far as there is room.

        Before it is due without its gradient: that may still change.
        """
        self._ahead[pack] = None
        due = self._due.get(pack)
        for tile in self._tiles[pack] if due is None else due:
            if not self._begin(tile, grads=due is not None, patient=False):
                return

    def advance(self) -> None:
        """Update what has been read meanwhile; never waits for the disk."""
        for pack in list(self._ahead):
            due = self._due.get(pack)
            while due and self._has_landed(due[0]):
                self._pager.need(pack, What.WEIGHTS)
                try:
                    self._apply(due)
                finally:
                    self._pager.drop(pack, What.WEIGHTS, dirty=True, keep=True)
            self.read_ahead(pack)

    def finish(self, pack: int) -> None:
        """Pay the debt of one pack; its weights may be used afterwards.

        Raises
        ------
        StoreError
            A tile cannot be read; the update stays due.
        """
        due = self._due.get(pack)
        if due is None:
            return
        self._pager.need(pack, What.WEIGHTS)
        try:
            while due:
                self._current = due[0]
                ahead = set(due[0].slabs)
                self._begin(due[0], patient=True)
                self.read_ahead(pack)
                self._apply(due, ahead)
        finally:
            self._current = None
            self._pager.drop(pack, What.WEIGHTS, dirty=True)
        del self._due[pack]
        self._ahead.pop(pack, None)
        if pack in self._unwanted:
            self._unwanted.remove(pack)
            self._pager.discard(pack, What.GRADS)

    def settle(self, pack: int) -> None:
        """Pay the debt of one pack, and forget what was read of its states: they may change."""
        self.finish(pack)
        self._give_back(pack)

    def finish_all(self) -> None:
        """Pay every debt; what was written may still be on its way to the disk."""
        packs = list(self._due)
        for pack, after in zip_longest(packs, packs[1:]):
            if after is not None and self._pager.fetch(after, What.WEIGHTS):
                self.read_ahead(after)
            self.finish(pack)

    def forget_gradient(self, pack: int) -> None:
        """Let a pack's pending gradient go: now, or once its update is done."""
        if pack in self._due:
            self._unwanted.add(pack)
        else:
            self._give_back(pack)
            self._pager.discard(pack, What.GRADS)

    def rest(self) -> None:
        """Give all memory back; what is due stays due."""
        for pack in list(self._ahead):
            self._give_back(pack)

    # -- inside ---------------------------------------------------------------------------------------

    def _begin(self, tile: _Tile, *, grads: bool = True, patient: bool) -> bool:
        """Start to read a tile; False if there is no room for all of it."""
        for each in self._streamed(tile) if grads else self._states(tile):
            piece = self._pager.piece(tile.pack, each)
            if each in tile.slabs:
                continue
            if piece.resident or piece.slab is not None:
                if not self._pager.fetch(tile.pack, each, patient=patient):
                    return False
                continue
            read = self._pager.read_tile(piece, tile.start, tile.stop, patient=patient)
            if read is None:
                return False
            tile.slabs[each], tile.reading[each] = read
        return True

    def _apply(self, due: deque[_Tile], ahead: set[What] | None = None) -> None:
        """Update the first tile; it is due no more. ``ahead``: what of it was read ahead, if not all."""
        tile, pager = due[0], self._pager
        pack = pager.packs[tile.pack]
        try:
            for what, reading in tile.reading.items():
                pager.wait_for_tile(
                    pager.piece(tile.pack, what),
                    tile.start,
                    reading,
                    missed=ahead is not None and what not in ahead,
                )
        except BaseException:
            self._give_tile_back(tile)
            raise
        streamed = self._streamed(tile)
        whole = [what for what in streamed if what not in tile.slabs]
        pager.need_all((tile.pack, what) for what in whole)
        arrays = {what: self._array(tile, what) for what in (What.WEIGHTS, *streamed)}
        start = time.perf_counter()
        with pager.must_end(f"the update of {pack.name}"):
            self._update(tile, arrays)
        due.popleft()
        end = time.perf_counter()
        self.seconds += end - start
        for what in whole:
            pager.drop(
                tile.pack,
                what,
                dirty=what is not What.GRADS,
                keep=what is What.GRADS or bool(due),
            )
        for what, slab in tile.slabs.items():
            if what is What.GRADS:
                pager.pool.give(slab)
            else:
                pager.write_tile(pager.piece(tile.pack, what), tile.start, slab)
        tile.slabs.clear()
        tile.reading.clear()
        name = f"{pack.name}.{tile.start // pager.tile_numel}"
        self._on_span(
            Span(kind="STEP", name=name, start_s=start, end_s=end, lane="update")
        )

    def _update(self, tile: _Tile, arrays: dict[What, Any]) -> None:
        """Run the kernels; that no gradient is infinite is known from the norm."""
        pack = self._pager.packs[tile.pack]
        weights, grads = arrays[What.WEIGHTS], arrays[What.GRADS]
        param = Split(weights, arrays[What.LOW]) if pack.split else weights
        if pack.encoded:
            segments = _encoded_segments(pack, tile, arrays[What.ENCODED])
            if self.chooser.looking:
                for segment in segments:
                    self.chooser.look(segment, param, grads, self._grad_scale)
            update_encoded(
                param,
                grads,
                segments,
                grad_scale=self._grad_scale,
                finite=True,
                threads=self._threads,
            )
        else:
            moments = arrays[What.EXP_AVG], arrays[What.EXP_AVG_SQ]
            update(
                param,
                *moments,
                grads,
                tile.segments,
                grad_scale=self._grad_scale,
                threads=self._threads,
            )

    def _has_landed(self, tile: _Tile) -> bool:
        """Whether an update of the tile would not have to wait."""
        if not self._pager.piece(tile.pack, What.WEIGHTS).landed:
            return False
        for what in self._streamed(tile):
            if what in tile.slabs:
                reading = tile.reading[what]
                if reading is not None and not reading.done():
                    return False
            elif not self._pager.piece(tile.pack, what).landed:
                return False
        return True

    def _states(self, tile: _Tile) -> tuple[What, ...]:
        return states_of(self._pager.packs[tile.pack])

    def _streamed(self, tile: _Tile) -> tuple[What, ...]:
        return (What.GRADS, *self._states(tile))

    def _array(self, tile: _Tile, what: What) -> Any:
        slab, piece = tile.slabs.get(what), self._pager.piece(tile.pack, what)
        if slab is not None:
            return piece.over(slab, tile.start, tile.stop)
        return piece.part(tile.start, tile.stop)

    def _give_way(self) -> bool:
        """Give back the tile that was read ahead and is needed last; False if there is none."""
        for pack in reversed(self._ahead):
            for tile in reversed(self._tiles[pack]):
                if tile.slabs and tile is not self._current:
                    self._give_tile_back(tile)
                    return True
        return False

    def _give_back(self, pack: int) -> None:
        self._ahead.pop(pack, None)
        for tile in self._tiles[pack]:
            self._give_tile_back(tile)

    def _give_tile_back(self, tile: _Tile) -> None:
        name = self._pager.packs[tile.pack].name
        for what, slab in tile.slabs.items():
            reading = [read for read in [tile.reading[what]] if read is not None]
            self._pager.give_up(slab, reading, what=f"reading tiles of {name}")
        tile.slabs.clear()
        tile.reading.clear()


def _clip(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    return [
        replace(s, start=max(s.start, start) - start, stop=min(s.stop, stop) - start)
        for s in segments
        if s.start < stop and s.stop > start
    ]


def _encoded_segments(pack: PackSpec, tile: _Tile, data: Any) -> list[EncodedSegment]:
    """Return the segments of a tile with their encoded moments."""
    parts = {
        part.start - tile.start: part
        for part in pack.moment_parts(tile.start, tile.stop)
    }
    found = []
    for segment in tile.segments:
        part = parts[segment.start]
        assert part.stop - tile.start == segment.stop
        found.append(
            EncodedSegment(
                segment.start,
                segment.stop,
                get(part.param.codec),
                data[part.first_byte : part.first_byte + part.num_bytes],
                segment.config,
                segment.step,
                segment.seed,
                part.start - part.param.offset,
                part.param.name,
            )
        )
    return found
