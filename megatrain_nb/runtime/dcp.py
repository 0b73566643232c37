"""Folders of torch.distributed.checkpoint (DCP): written with torch's own classes, one piece in RAM at a time.

[Note: a DCP folder] It holds tensors by key, each as chunks (boxes that together are the tensor), and small
objects. ``.metadata`` says which there are and where in the ``.distcp`` files each chunk lies. DCP plans first what
is written, and asks the planner for a value when it writes it; so a plan over tensors on the meta device costs
nothing, and the values come from the store when they are asked for. torch keeps what it has written to a file
until the file is complete, so a file is small here: one chunk, or several small tensors. Files go past the page
cache, while the next values are read.
"""

from __future__ import annotations

import io
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from megatrain_nb.store.outfile import FileWriter

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor that is opened when it is written.

    Attributes
    ----------
    shape, dtype
        What it will be.
    opened
        Gives the values for a moment.
    order
        Tensors are written in this order: those of one piece of the store one after the other.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    opened: Callable[[], AbstractContextManager[Tensor]]
    order: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it will take."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def placeholder(self) -> Tensor:
        """Return a tensor without memory that looks like it."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class LazyPlanner(DefaultSavePlanner):
    """Plans what is not in RAM, and opens each tensor when its turn comes.

    Parameters
    ----------
    lazy
        By flattened key; the state dict has a placeholder there.
    aliases
        Keys that mean the tensor of another key: written once, found under both.
    on_written
        Hears of the bytes of each chunk.
    """

    def __init__(
        self,
        lazy: Mapping[str, Lazy],
        aliases: Mapping[str, str],
        on_written: Callable[[int], object],
    ) -> None:
        super().__init__()
        self.aliases = aliases
        self._lazy = lazy
        self._on_written = on_written
        self._open = ExitStack()
        self._key = ""
        self._values = torch.empty(0)

    def create_local_plan(self) -> SavePlan:
        """Cut large tensors into chunks, and order all by where they lie."""
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._cut(item)]
        self.plan = replace(plan, items=sorted(items, key=self._order))
        return self.plan

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        """Let the metadata know the aliases as well."""
        plans, metadata = super().create_global_plan(all_plans)
        known = metadata.state_dict_metadata
        for alias, key in self.aliases.items():
            known[alias] = known[key]
            head, _, rest = alias.partition(".")
            metadata.planner_data[alias] = (head, rest)
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the values of a chunk, a copy of their own."""
        key = write_item.index.fqn
        if key not in self._lazy:
            return super().resolve_data(write_item)
        if key != self._key:
            self.close()
            self._values = self._open.enter_context(self._lazy[key].opened())
            self._key = key
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        values = _box(self._values, chunk.offsets, chunk.sizes)
        self._on_written(values.numel() * self._lazy[key].dtype.itemsize)
        return values.to(self._lazy[key].dtype, copy=True).contiguous()

    def close(self) -> None:
        """Let go of the tensor that is open."""
        self._key, self._values = "", torch.empty(0)
        self._open.close()

    def _order(self, item: WriteItem) -> tuple[int, ...]:
        lazy = self._lazy.get(item.index.fqn)
        return (-1,) if lazy is None else lazy.order

    def _cut(self, item: WriteItem) -> list[WriteItem]:
        if item.type != WriteItemType.TENSOR or item.index.fqn not in self._lazy:
            return [item]
        data = item.tensor_data
        assert data is not None
        most = CHUNK_BYTES // data.properties.dtype.itemsize
        boxes = list(boxes_of(tuple(data.size), most))
        if len(boxes) == 1:
            return [item]
        found = []
        for offsets, sizes in boxes:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            found.append(
                replace(
                    item,
                    index=MetadataIndex(item.index.fqn, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=replace(data, chunk=chunk),
                )
            )
        return found


class _Stream(io.RawIOBase):
    """The file that is open, as torch wants one."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._length = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view:
            self._file.write(view)
            self._length += len(view)
        return len(view)

    def tell(self) -> int:
        return self._length


class _PastCache(FileSystem):
    """torch's files, past the page cache and on the disk when they are closed."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._file.opened(Path(path)):
            yield _Stream(self._file)


class SmallFilesWriter(FileSystemWriter):
    """torch's writer; files are small, so that little of what was written stays in RAM."""

    def __init__(self, path: Path, file: FileWriter) -> None:
        # Nothing is copied ahead: torch would sort what it copies ahead by size.
        super().__init__(
            path, thread_count=1, per_thread_copy_ahead=0, sync_files=False
        )
        self.fs = _PastCache(file)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        """Write the plan, some items at a time."""
        assert isinstance(planner, LazyPlanner)
        results: list[WriteResult] = []
        for number, items in enumerate(_groups(plan.items)):
            prefix = replace(plan.storage_data, prefix=f"__0_{number}_")
            part = replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        by_key: dict[str, list[WriteResult]] = {}
        for result in results:
            by_key.setdefault(result.index.fqn, []).append(result)
        for alias, key in planner.aliases.items():
            results += [
                replace(x, index=replace(x.index, fqn=alias)) for x in by_key[key]
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def write_folder(
    path: Path, state_dict: dict[str, Any], planner: LazyPlanner, file: FileWriter
) -> None:
    """Write a DCP folder as ``torch.distributed.checkpoint.save`` does in a single process.

    Parameters
    ----------
    path
        A new folder.
    state_dict
        Nested; of what the planner opens it holds placeholders.
    planner
        Opens them.
    file
        Writes them.
    """
    writer = SmallFilesWriter(path, file)
    try:
        writer.set_up_storage_writer(True)
        planner.set_up_planner(state_dict, writer.storage_meta(), True)
        local = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([local])
        [plan] = writer.prepare_global_plan(plans)
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        writer.finish(metadata, [results])
    finally:
        planner.close()


def boxes_of(
    shape: tuple[int, ...], most: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape into boxes of at most ``most`` elements, each of them contiguous: offsets and sizes.

    Examples
    --------
    >>> list(boxes_of((3, 2), 4))
    [((0, 0), (2, 2)), ((2, 0), (1, 2))]
    >>> list(boxes_of((2, 3), 2))
    [((0, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 0), (1, 2)), ((1, 2), (1, 1))]
    """
    inner = torch.Size(shape[1:]).numel()
    if not shape or shape[0] * inner <= most:
        yield (0,) * len(shape), shape
    elif inner > most:
        for first in range(shape[0]):
            for offsets, sizes in boxes_of(shape[1:], most):
                yield (first, *offsets), (1, *sizes)
    else:
        rows = most // inner
        for first in range(0, shape[0], rows):
            sizes = (min(rows, shape[0] - first), *shape[1:])
            yield (first, *(0,) * (len(shape) - 1)), sizes


def _box(values: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        values = values.narrow(dim, offset, size)
    return values


def _groups(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Deal items out to files, in order."""
    group: list[WriteItem] = []
    size = 0
    for item in items:
        data = item.tensor_data
        bytes_ = (
            0
            if data is None
            else data.chunk.sizes.numel() * data.properties.dtype.itemsize
        )
        if group and size + bytes_ > CHUNK_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += bytes_
    if group:
        yield group
