"""Write a trained model as an ordinary Hugging Face folder, some MB of it in RAM at a time.

The weights get the names and forms that transformers writes (experts apart, projections as their authors have
them): its own reversal of what it does when it loads is done on lazy tensors (`megatrain_nb.runtime.lazy`).
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.runtime.folder import put_in_place, recover, staged, weight_names
from megatrain_nb.runtime.layers import parse_dtype
from megatrain_nb.runtime.lazy import (
    At,
    Joined,
    at,
    cast,
    lazy,
    leaves,
    num_bytes,
    under_casts,
    value,
    whole,
)
from megatrain_nb.runtime.leaves import DTYPES, tree_of
from megatrain_nb.runtime.piece import What, master_of
from megatrain_nb.runtime.progress import byte_bar
from megatrain_nb.runtime.shards import SAFE_INDEX
from megatrain_nb.runtime.source import MasterSource, PieceSource
from megatrain_nb.runtime.tensor import source_of
from megatrain_nb.store.base import ALIGN_BYTES, round_up
from megatrain_nb.store.host import map_pages
from megatrain_nb.store.outfile import FileWriter
from megatrain_nb.store.preflight import takes_direct
from megatrain_nb.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from tqdm.auto import tqdm

    from megatrain_nb.runtime.lazy import LazyTensor, Node, Shape, Whole
    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.runtime.pager import Pager

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_BYTES = 16 * 2**20
# Pieces of memory that files are written from, and the length of one.
_NUM_PIECES, _PIECE_BYTES, _LEAST_PIECE_BYTES = 4, 16 * 2**20, 2**20

# What transformers gives where it saves, and where it means what is done here anyway.
_USUAL = {"push_to_hub": False, "save_original_format": True, "save_peft_format": True, "safe_serialization": True}  # fmt: skip


def save_pretrained(
    model: nn.Module,
    save_directory: str | Path,
    *,
    max_shard_size: float | str = "5GB",
    dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> None:
    """Write config and weights so that ``from_pretrained(save_directory)`` gives the same model.

    Parameters
    ----------
    model
        In a session, or an ordinary one.
    save_directory
        Made if it is missing; weights of an earlier save there are replaced, other files stay.
    max_shard_size
        Of one file: GB or text such as ``"5GB"``. A parameter is never split.
    dtype
        Of the parameters: ``torch.float32``, which for a model in bf16 writes the exact master, or
        ``torch.bfloat16``; None: what they are. Buffers stay as they are.
    tokenizer
        A tokenizer or processor, written with the model.
    **kwargs
        ``is_main_process=False`` writes nothing. Any other option that is not None is refused.

    Raises
    ------
    ArgumentError
        The path is a file, another dtype, or an option that has no meaning here.
    StoreError
        The disk is full or failed. An earlier save in the folder is whole then, as it is after a crash.
    """
    if not kwargs.pop("is_main_process", True):
        return
    refused = [name for name, value in kwargs.items()
               if value is not None and _USUAL.get(name) is not value]  # fmt: skip
    if refused:
        msg = f"save_pretrained writes the model's own weights; leave out {', '.join(refused)}"
        raise ArgumentError(msg)
    directory = Path(save_directory)
    if directory.exists() and not directory.is_dir():
        msg = f"{directory} is a file; give a directory"
        raise ArgumentError(msg)
    most, wanted = parse_size(max_shard_size, name="max_shard_size"), parse_dtype(dtype)
    shards = _shards(_tensors(model, wanted), most)
    total = sum(num_bytes(x._node) for shard in shards for x in shard.values())
    offloaded = getattr(model, "_megatrain", None)
    try:
        recover(directory)
        with staged(directory) as folder:
            names = weight_names(directory, len(shards))
            with (
                byte_bar(total, "Saving") as bar,
                _Reading(model, shards) as reading,
                staging(offloaded, total) as pieces,
                FileWriter(pieces, direct=takes_direct(folder)) as file,
            ):
                for shard, name in zip(shards, names, strict=True):
                    with file.opened(folder / name):
                        _write_shard(file, shard, reading, bar)
            if len(names) > 1:
                _write_index(folder / SAFE_INDEX, shards, names, total)
            _write_beside(model, folder, shards, tokenizer)
            put_in_place(folder, directory)
    except OSError as error:
        msg = f"saving {format_bytes(total)} to {directory} failed: {error.strerror}; what was there before is whole; make room, and save again"
        raise StoreError(msg) from error
    if offloaded is not None:
        offloaded.note_saved()


@dataclass(frozen=True)
class Stored:
    """A stretch of a parameter whose values are in the store."""

    name: str
    source: PieceSource | MasterSource
    shape: Shape
    dtype: torch.dtype
    offset: int = 0

    @contextmanager
    def read(self, start: int, stop: int) -> Iterator[Tensor]:
        """Give elements ``start`` to ``stop`` for a moment."""
        first = self.offset + start
        with self.source.part(first, first + stop - start) as values:
            yield values

    def part(self, offset: int, shape: Shape) -> Stored:
        """Return a stretch of it that begins at element ``offset``."""
        return replace(self, offset=self.offset + offset, shape=shape)


def _tensors(model: nn.Module, dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """Return what is to be written, by the names that transformers writes; a tied parameter goes once."""
    found: dict[str, LazyTensor] = {}
    for name, param in model.named_parameters():
        found[name] = _lazy(name, param, dtype or param.dtype)
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            found[name] = _lazy(name, buffer, buffer.dtype)
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        found.pop(name, None)
    if hasattr(model, "config") and hasattr(model, "_keys_to_ignore_on_save"):
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

        found = revert_weight_conversion(model, found)  # type: ignore[arg-type]
    return found


def _lazy(name: str, tensor: Tensor, dtype: torch.dtype) -> LazyTensor:
    shape, source = tuple(tensor.shape), source_of(tensor)
    node = tree_of(name, tensor)
    if isinstance(source, PieceSource):
        exact = source.master() if dtype == torch.float32 else source
        assert isinstance(exact, PieceSource | MasterSource)
        known = torch.float32 if isinstance(exact, MasterSource) else tensor.dtype
        node = at(Stored(name, exact, shape, known))
    return lazy(cast(node, dtype))


def _shards(tensors: dict[str, LazyTensor], max_bytes: int) -> list[dict[str, LazyTensor]]:  # fmt: skip
    """Deal the tensors out to files, in order."""
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + num_bytes(tensor._node) > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes(tensor._node)
    return shards


class _Reading:
    """Reads tensors in the order in which they are written; the next pack comes while one is written."""

    def __init__(self, model: nn.Module, shards: list[dict[str, LazyTensor]]) -> None:
        self._offloaded = getattr(model, "_megatrain", None)
        homes = {} if self._offloaded is None else self._offloaded.layers.homes
        self._pack_of = {home.spec.name: home.pack.index for home in homes.values()}
        order = [
            (self._pack_of[leaf.name], leaf.dtype)
            for shard in shards
            for tensor in shard.values()
            for leaf in leaves(tensor._node)
            if isinstance(leaf, Stored)
        ]
        self._after = {
            pack: after for (pack, _), after in pairwise(order)
            if pack != after[0]
        }  # fmt: skip

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        if self._offloaded is not None:
            self._offloaded.pager.close_held()

    def pieces(self, node: Node) -> Iterator[Tensor]:
        """Yield a tensor's values, flat and in order, some MB at a time."""
        node = under_casts(node)
        if isinstance(node, At):
            leaf = node.leaf
            if isinstance(leaf, Stored):
                self._look_ahead(leaf)
            numel, step = math.prod(leaf.shape), _CHUNK_BYTES // leaf.dtype.itemsize
            for start in range(0, numel, step):
                with leaf.read(start, min(start + step, numel)) as values:
                    yield values
        elif isinstance(node, Joined) and node.dim == 0:
            for child in node.children:
                yield from self.pieces(child)
        else:
            with self._room(whole(node)):
                yield value(node).reshape(-1)

    def _look_ahead(self, leaf: Stored) -> None:
        pack, dtype = self._after.pop(self._pack_of[leaf.name], (None, None))
        if pack is None:
            return
        offloaded = self._offloaded
        assert offloaded is not None
        pager = offloaded.pager
        if not pager.is_due(pack) and pack not in offloaded.executor.tail:
            exact = dtype == torch.float32
            for what in master_of(pager.packs[pack]) if exact else (What.WEIGHTS,):
                pager.fetch(pack, what)

    def _room(self, needed: Whole) -> AbstractContextManager[object]:
        """Let the pool keep room for what is computed beside it."""
        if self._offloaded is None:
            return nullcontext()
        pager: Pager = self._offloaded.pager
        return pager.room(needed.scratch_bytes, "converting weights")


@contextmanager
def staging(
    offloaded: OffloadedModel | None, total_bytes: int
) -> Iterator[list[NDArray[np.uint8]]]:
    """Give memory to write from: the pool's, where it has some beside what reading takes; else twice 1 MiB."""
    most = min(_PIECE_BYTES, round_up(max(total_bytes, 1)))
    slabs = []
    with ExitStack() as giving:
        if offloaded is not None:
            pager: Pager = offloaded.pager
            pager.barrier()
            room = pager.pool.limit_bytes - pager.pool.in_use_bytes
            # A pack's weights, what its update takes if that is due, and the next pack's weights.
            room -= 5 * 4 * max((pack.numel for pack in pager.packs), default=0)
            size = min(most, room // _NUM_PIECES // ALIGN_BYTES * ALIGN_BYTES)
            if size >= min(most, _LEAST_PIECE_BYTES):
                for _ in range(_NUM_PIECES):
                    slab = pager.borrow(size, "saving")
                    giving.callback(pager.pool.give, slab)
                    slabs.append(slab.array)
        if not slabs:
            size = min(most, _LEAST_PIECE_BYTES)
            slabs = [np.frombuffer(map_pages(size), np.uint8) for _ in range(2)]
        yield slabs


def _write_shard(file: FileWriter, shard: dict[str, LazyTensor], reading: _Reading, bar: tqdm[Any]) -> None:  # fmt: skip
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in shard.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + num_bytes(tensor._node)],
        }
        offset += num_bytes(tensor._node)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in shard.values():
        _write_tensor(file, tensor, reading, bar)


def _write_tensor(
    file: FileWriter, tensor: LazyTensor, reading: _Reading, bar: tqdm[Any]
) -> None:
    dtype = tensor.dtype
    for values in reading.pieces(tensor._node):
        data = values.detach().to("cpu", dtype).contiguous().view(torch.uint8)
        file.write(data.numpy().data)
        bar.update(data.numel())


def _write_index(path: Path, shards: list[dict[str, LazyTensor]], names: list[str], total: int) -> None:  # fmt: skip
    weight_map = {
        key: name for shard, name in zip(shards, names, strict=True) for key in shard
    }
    count = sum(x.numel() for shard in shards for x in shard.values())
    metadata = {"total_parameters": count, "total_size": total}
    content = {"metadata": metadata, "weight_map": weight_map}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_beside(
    model: nn.Module,
    folder: Path,
    shards: list[dict[str, LazyTensor]],
    tokenizer: Any,
) -> None:
    """Write what is not weights: config, generation config, tokenizer, the model's own code."""
    if hasattr(model, "is_remote_code") and model.is_remote_code():  # type: ignore[operator]
        from transformers.dynamic_module_utils import custom_object_save  # noqa: PLC0415

        custom_object_save(model, folder, config=model.config)  # type: ignore[arg-type]
    for part in ("config", "generation_config"):
        if hasattr(getattr(model, part, None), "save_pretrained"):
            with _noted(model, getattr(model, part), shards):
                getattr(model, part).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def _noted(
    model: nn.Module, config: Any, shards: list[dict[str, LazyTensor]]
) -> Iterator[None]:
    """Let the config say whose weights they are and what is in the files, as transformers does when it saves."""
    if hasattr(config, "architectures"):
        config.architectures = [type(model).__name__]
    tensors = [x for shard in shards for x in shard.values()]
    dtype = next((x.dtype for x in tensors if x.dtype.is_floating_point), None)
    if dtype is None or getattr(config, "dtype", None) is None:
        yield
        return
    before, config.dtype = config.dtype, dtype
    try:
        yield
    finally:
        config.dtype = before
