"""The optimizer step on tiles: read, update, write, each beside the others.

A tile of each piece that is on disk is read ahead while the one before is updated and the one before
that is written behind; pieces in RAM are updated where they are. The pool bounds how far ahead it gets.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatrain_nb.optim.adamw import Segment, update
from megatrain_nb.plan.timeline import Span
from megatrain_nb.runtime.offload import as_array
from megatrain_nb.runtime.pager import What

if TYPE_CHECKING:
    from concurrent.futures import Future

    from numpy.typing import NDArray
    from torch import nn

    from megatrain_nb.optim.adamw import UpdateThreads
    from megatrain_nb.optim.config import AdamWConfig
    from megatrain_nb.plan.model import PackSpec
    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.runtime.pager import Pager, Piece
    from megatrain_nb.store.host import Slab

# How many tiles are read before the first of them is updated.
_READ_AHEAD = 2


@dataclass(slots=True)
class _Tile:
    """One range of one pack, with the four arrays that its update needs."""

    pack: PackSpec
    start: int
    stop: int
    segments: list[Segment]
    slabs: dict[What, Slab] = field(default_factory=dict)
    reading: list[Future[None]] = field(default_factory=list)

    def array(self, piece: Piece) -> NDArray[np.float32]:
        slab = self.slabs.get(piece.what)
        if slab is not None:
            return slab.view(np.float32, 0, self.stop - self.start)
        return piece.floats()[self.start : self.stop]


def update_all(
    offloaded: OffloadedModel,
    configs: dict[nn.Parameter, AdamWConfig],
    *,
    grad_scale: float,
) -> None:
    """Apply one AdamW step to every parameter of ``configs`` that has a pending gradient.

    Parameters
    ----------
    offloaded
        The model; its `steps` count on.
    configs
        Hyper-parameters by parameter.
    grad_scale
        Clip coefficient.
    """
    pager, threads = offloaded.pager, offloaded.session.threads
    tiles = deque(_tiles(offloaded, configs))
    ready: deque[_Tile] = deque()
    while tiles or ready:
        while tiles and len(ready) <= _READ_AHEAD:
            ready.append(_begin(pager, tiles.popleft()))
        _update(pager, ready.popleft(), grad_scale, threads, offloaded)
    _update_ordinary(offloaded, configs, grad_scale, threads)
    offloaded.executor.version += 1
    pager.barrier()  # a step that ended has reached the disk


def _tiles(
    offloaded: OffloadedModel, configs: dict[nn.Parameter, AdamWConfig]
) -> list[_Tile]:
    """Cut what has gradients into tiles, in the order of the packs: the next forward needs them so."""
    by_pack: dict[int, list[Segment]] = {}
    for param, config in configs.items():
        if param in offloaded.executor.norms:
            offloaded.steps[param] = offloaded.steps.get(param, 0) + 1
            home = offloaded.layers.homes[param]
            segment = Segment(
                home.spec.offset,
                home.spec.offset + home.spec.numel,
                config,
                offloaded.steps[param],
            )
            by_pack.setdefault(home.pack.index, []).append(segment)
    return [
        _Tile(pack, start, stop, inside)
        for pack in offloaded.layers.spec.packs
        for start, stop in pack.tiles(offloaded.pager.tile_numel)
        if (inside := _clip(by_pack.get(pack.index, ()), start, stop))
    ]


def _clip(segments: list[Segment] | tuple[()], start: int, stop: int) -> list[Segment]:
    return [
        Segment(
            max(s.start, start) - start, min(s.stop, stop) - start, s.config, s.step
        )
        for s in segments
        if s.start < stop and s.stop > start
    ]


def _begin(pager: Pager, tile: _Tile) -> _Tile:
    for what in What:
        piece = pager.piece(tile.pack.index, what)
        if piece.resident or piece.slab is not None:
            pager.need(tile.pack.index, what)
            continue
        tile.slabs[what], reading = pager.read_tile(piece, tile.start, tile.stop)
        if reading is not None:
            tile.reading.append(reading)
    return tile


def _update(
    pager: Pager,
    tile: _Tile,
    grad_scale: float,
    threads: UpdateThreads,
    offloaded: OffloadedModel,
) -> None:
    for reading in tile.reading:
        pager.wait_for(reading, f"reading tiles of {tile.pack.name}")
    pieces = {what: pager.piece(tile.pack.index, what) for what in What}
    start = time.perf_counter()
    update(
        tile.array(pieces[What.WEIGHTS]),
        tile.array(pieces[What.EXP_AVG]),
        tile.array(pieces[What.EXP_AVG_SQ]),
        tile.array(pieces[What.GRADS]),
        tile.segments,
        grad_scale=grad_scale,
        threads=threads,
    )
    end = time.perf_counter()
    name = f"{tile.pack.name}.{tile.start // pager.tile_numel}"
    offloaded.session.on_span(
        Span(kind="STEP", name=name, start_s=start, end_s=end, lane="update")
    )
    for what, piece in pieces.items():
        if what not in tile.slabs:
            pager.drop(tile.pack.index, what, dirty=what is not What.GRADS)
        elif what is What.GRADS:
            pager.pool.give(tile.slabs[what])
        else:
            pager.write_tile(piece, tile.start, tile.slabs[what])


def _update_ordinary(
    offloaded: OffloadedModel,
    configs: dict[nn.Parameter, AdamWConfig],
    grad_scale: float,
    threads: UpdateThreads,
) -> None:
    """Update the parameters that are not streamed, in place."""
    for param, config in configs.items():
        if param in offloaded.layers.homes or param.grad is None:
            continue
        offloaded.steps[param] = step = offloaded.steps.get(param, 0) + 1
        moments = [
            offloaded.moment(param, what) for what in (What.EXP_AVG, What.EXP_AVG_SQ)
        ]
        on_host = [
            tensor.detach().to("cpu").contiguous()
            for tensor in (param, *moments, param.grad)
        ]
        arrays = [as_array(tensor) for tensor in on_host]
        segment = Segment(0, param.numel(), config, step)
        update(
            arrays[0],
            arrays[1],
            arrays[2],
            arrays[3],
            [segment],
            grad_scale=grad_scale,
            threads=threads,
        )
        with torch.no_grad():
            for tensor, host in zip((param, *moments), on_host, strict=False):
                if tensor.data_ptr() != host.data_ptr():
                    tensor.copy_(host)
