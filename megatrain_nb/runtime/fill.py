"""Bring a model's weights into the store, pack by pack, in chunks.

Whatever the weights are in (RAM, a mapped file, a checkpoint's files), a pack's places in the store are opened, and
a few threads read the next chunks while the last ones are converted into them. The pager writes the pack before
meanwhile. So there is a pack in RAM, one more on its way to the disk, and a few chunks.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from megatrain_nb.codec.split import Split, split
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.lanes import tensor_over
from megatrain_nb.runtime.layers import part_of
from megatrain_nb.runtime.lazy import (
    LazyTensor,
    Node,
    Place,
    Whole,
    leaves,
    make_lazy,
    make_plain,
    node_of,
    num_bytes,
    origin,
    places,
    value,
)
from megatrain_nb.runtime.leaves import FilePart, tree_of
from megatrain_nb.runtime.mapped import Mapped
from megatrain_nb.runtime.piece import What, master_of
from megatrain_nb.runtime.progress import byte_bar
from megatrain_nb.runtime.tensor import (
    StreamedParameter,
    plain_parameter,
    stream_parameter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tqdm.auto import tqdm

    from megatrain_nb.plan.model import PackSpec
    from megatrain_nb.runtime.layers import Layers
    from megatrain_nb.runtime.lazy import Leaf
    from megatrain_nb.runtime.offload import OffloadedModel

_CHUNK_BYTES = 8 << 20
_THREADS = 4
# Reads that are under way or wait to be converted: as many chunks are in RAM at most.
_AHEAD = 8

Views = tuple[Tensor, ...]

# Where values were before they moved in: a tree over files, or a tensor in a mapped file.
Origin = Tensor | Node


def fill(offloaded: OffloadedModel, origins: dict[nn.Parameter, Origin]) -> None:
    """Bring every streamed parameter's values into the store; the parameters' own memory is freed as it goes.

    A split parameter's fp32 number is the very value that it has, or that its checkpoint holds. ``origins`` gets
    where in files the values of parameters are that have moved, so that they can be put back without any RAM.
    """
    packs: dict[int, list[nn.Parameter]] = {}
    for param, home in offloaded.layers.homes.items():
        packs.setdefault(home.pack.index, []).append(param)
    nodes = {param: tree_of(home.spec.name, param) for param, home in offloaded.layers.homes.items()}  # fmt: skip
    total = sum(num_bytes(leaf) for node in nodes.values() for leaf in leaves(node))
    with byte_bar(total, "Loading") as bar, _Filling(offloaded, bar) as filling:
        for index, params in packs.items():
            pack = offloaded.layers.spec.packs[index]
            filling.pack(pack, {param: nodes[param] for param in params})
            for param in params:
                home, source = offloaded.layers.homes[param], offloaded.source(param)
                if nodes[param] is node_of(param):
                    origins[param] = nodes[param]
                    # Else the parameter would hold its file.
                    del param._node  # type: ignore[attr-defined]
                elif filling.mapped.holds(param):
                    origins[param] = param.data
                stream_parameter(param, source, offloaded.device, home.dtype)
    offloaded.pager.barrier()


def put_back(param: nn.Parameter, before: Origin) -> None:
    """Let a parameter's values be where they were before `fill`, in a file."""
    if not isinstance(before, Tensor):
        make_lazy(param, before)
    elif isinstance(param, StreamedParameter):
        plain_parameter(param, before)


def read_what_stays(model: nn.Module, layers: Layers) -> None:
    """Read buffers, and the parameters that do not stream, from where they are in files."""
    for param in layers.resident.values():
        if isinstance(param, LazyTensor):
            make_plain(param)
    for module in model.modules():
        for buffer in module._buffers.values():
            if isinstance(buffer, LazyTensor):
                make_plain(buffer)


class _Filling:
    """Threads that read, and what they have read and nobody has used yet."""

    def __init__(self, offloaded: OffloadedModel, bar: tqdm[Any]) -> None:
        self.mapped = Mapped()
        self._offloaded = offloaded
        self._bar = bar
        self._readers = ThreadPoolExecutor(_THREADS, "megatrain-load")
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def __enter__(self) -> _Filling:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.shutdown(wait=True, cancel_futures=True)

    def pack(self, pack: PackSpec, nodes: dict[nn.Parameter, Node]) -> None:
        """Fill one pack."""
        offloaded = self._offloaded
        # What is bf16 already has no lower half: it is left out, and reads as zeros.
        exact = pack.split and any(origin(x) != torch.bfloat16 for x in nodes.values())
        kinds = master_of(pack) if exact else (What.WEIGHTS,)
        stop = offloaded.executor.stop
        with (
            interrupts_wait(stop),
            offloaded.pager.opened(pack.index, *kinds, write=True) as arrays,
        ):
            try:
                for param, node in nodes.items():
                    home = offloaded.layers.homes[param]
                    flats = [torch.from_numpy(x) for x in arrays] if exact else [tensor_over(arrays[0])]  # fmt: skip
                    for place in places(node, [part_of(flat, home) for flat in flats]):
                        self._place(place)
                        if stop.is_set():
                            raise KeyboardInterrupt
                self._finish(0)
            finally:  # until the last read has ended, the pack's memory is the readers'
                for future, _ in self._waiting:
                    if not future.cancel():
                        future.exception()
                self._waiting.clear()

    def _place(self, place: Place) -> None:
        what = place.what
        if isinstance(what, Whole):
            self._finish(0)
            read = list(leaves(what.node))
            converting = f"converting {read[0].name}"
            with self._offloaded.pager.room(what.scratch_bytes, converting):
                values = value(what.node)
                _put(values.reshape(-1), place.target)
            self._bar.update(sum(num_bytes(leaf) for leaf in read))
            return
        part = self.mapped.in_file(what)
        for start, stop, views in _chunks(what, place.target):
            self._chunk(part or what, start, stop, views)
            if part is not None:
                with what.read(start, stop) as values:
                    self.mapped.let_go(values)  # pages that somebody looked at

    def _chunk(self, leaf: Leaf, start: int, stop: int, views: Views) -> None:
        self._finish(_AHEAD)
        size = (stop - start) * leaf.dtype.itemsize

        def done(values: Tensor | None) -> None:
            if values is not None:
                _put(values, views)
            self._bar.update(size)

        if not isinstance(leaf, FilePart):
            self._finish(0)
            with leaf.read(start, stop) as values:
                done(values)
                self.mapped.let_go(values)
            return
        target = views[0]
        read: Future[Any]
        if len(views) == 1 and target.dtype == leaf.dtype and target.is_contiguous():
            read = self._readers.submit(leaf.read_into, target.view(-1), start)
        else:
            read = self._readers.submit(_read, leaf, start, stop)
        self._waiting.append((read, done))

    def _finish(self, left: int) -> None:
        """Use what was read, in order, until so many reads are left."""
        while len(self._waiting) > left:
            read, done = self._waiting.popleft()
            done(read.result())


def _read(leaf: FilePart, start: int, stop: int) -> Tensor:
    with leaf.read(start, stop) as values:
        return values


def _chunks(leaf: Leaf, target: Views) -> Iterator[tuple[int, int, Views]]:
    """Cut a leaf into stretches of some MB, and the views of where they go."""
    numel = math.prod(leaf.shape)
    most = max(1, _CHUNK_BYTES // max(leaf.dtype.itemsize, 1))
    if all(view.is_contiguous() for view in target):
        flat = [view.view(-1) for view in target]
        for start in range(0, numel, most):
            stop = min(start + most, numel)
            yield start, stop, tuple(view[start:stop] for view in flat)
        return
    length = leaf.shape[0]
    row = numel // max(length, 1)
    step = max(1, most // max(row, 1))
    for first in range(0, length, step):
        last = min(first + step, length)
        yield first * row, last * row, tuple(view[first:last] for view in target)


def _put(values: Tensor, views: Views) -> None:
    """Copy flat values into a view, or their two halves into two."""
    with torch.no_grad():
        if len(views) == 1:
            views[0].copy_(values.view(views[0].shape))
            return
        master = values.to("cpu", torch.float32).contiguous().numpy()
        hi, lo = views
        if hi.is_contiguous() and lo.is_contiguous():
            split(master, Split(hi.view(-1).numpy(), lo.view(-1).numpy()))
            return
        halves = Split(np.empty(master.size, np.uint16), np.empty(master.size, np.uint16))  # fmt: skip
        split(master, halves)
        for view, half in zip(views, halves, strict=True):
            view.copy_(torch.from_numpy(half).view(view.shape))
