"""Write a trained model as an ordinary Hugging Face folder, one parameter in RAM at a time."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm.auto import tqdm

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.runtime.layers import parse_dtype
from megatrain_nb.runtime.source import PieceSource
from megatrain_nb.runtime.tensor import source_of
from megatrain_nb.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# The safetensors format (https://github.com/huggingface/safetensors, "Format"): the header's length in
# 8 bytes, the header in JSON, the tensors one after the other. Its library writes whole shards from
# RAM only, so the bytes are written here.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CHUNK_BYTES = 16 * 2**20


def save_pretrained(
    model: nn.Module,
    save_directory: str | Path,
    *,
    max_shard_size: float | str = "5GB",
    dtype: torch.dtype | str | None = None,
    **kwargs: Any,
) -> None:
    """Write config and weights so that ``from_pretrained(save_directory)`` gives the same model.

    Parameters
    ----------
    model
        In a session, or an ordinary one.
    save_directory
        Made if it is missing; weights of an earlier save there are replaced.
    max_shard_size
        Of one file: GB or text such as ``"5GB"``. A parameter is never split.
    dtype
        Of the parameters: ``torch.float32``, which for a model in bf16 writes the exact master, or
        ``torch.bfloat16``; None: what they are. Buffers stay as they are.
    **kwargs
        ``is_main_process=False`` writes nothing. Any other option that is not None is refused.

    Raises
    ------
    ArgumentError
        The path is a file, another dtype, or an option that has no meaning here.
    StoreError
        The disk is full or failed. Until every weight is written an earlier save stays whole.
    """
    if not kwargs.pop("is_main_process", True):
        return
    if kwargs.pop("state_dict", None) is not None or any(
        value is not None for value in kwargs.values()
    ):
        msg = f"save_pretrained writes the model's own weights; leave out {', '.join(kwargs) or 'state_dict'}"
        raise ArgumentError(msg)
    directory = Path(save_directory)
    if directory.exists() and not directory.is_dir():
        msg = f"{directory} is a file; give a directory"
        raise ArgumentError(msg)
    directory.mkdir(parents=True, exist_ok=True)
    wanted = parse_dtype(dtype)
    shards = _shards(model, parse_size(max_shard_size, name="max_shard_size"), wanted)
    total = sum(item.nbytes for shard in shards for item in shard.values())
    names = [
        "model.safetensors"
        if len(shards) == 1
        else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        for index in range(1, len(shards) + 1)
    ]
    written = [directory / f".{name}.part" for name in names]
    safe = "what was there before is whole; "
    try:
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="Saving", delay=2, leave=False
        ) as bar:
            for shard, path in zip(shards, written, strict=True):
                _write_shard(path, shard, bar)
        safe = ""
        _replace(directory, names, written, shards, total)
        for part in ("config", "generation_config"):
            if hasattr(getattr(model, part, None), "save_pretrained"):
                with _noted(getattr(model, part), shards):
                    getattr(model, part).save_pretrained(directory)
    except OSError as error:
        msg = f"saving {format_bytes(total)} to {directory} failed: {error.strerror}; {safe}make room, and save again"
        raise StoreError(msg) from error
    finally:
        for path in written:
            path.unlink(missing_ok=True)
    offloaded = getattr(model, "_megatrain", None)
    if offloaded is not None:
        offloaded.note_saved()


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor, and what it is to be in the file."""

    tensor: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        """Give the values for a moment."""
        source = source_of(self.tensor)
        if source is None:
            yield self.tensor.detach().to(self.dtype)
            return
        if self.dtype == torch.float32 and isinstance(source, PieceSource):
            source = source.master()
        with source.opened(write=False) as values:
            yield values.to(self.dtype)


@contextmanager
def _noted(config: Any, shards: list[dict[str, _Item]]) -> Iterator[None]:
    """Let the config say what the weights in the files are, as transformers does when it saves."""
    items = [item for shard in shards for item in shard.values()]
    dtype = next((x.dtype for x in items if x.dtype.is_floating_point), None)
    if dtype is None or getattr(config, "dtype", None) is None:
        yield
        return
    before, config.dtype = config.dtype, dtype
    try:
        yield
    finally:
        config.dtype = before


def _shards(
    model: nn.Module, max_bytes: int, dtype: torch.dtype | None
) -> list[dict[str, _Item]]:
    """Deal the tensors out to files, in order; a tied parameter goes once, under its first name."""
    shards: list[dict[str, _Item]] = [{}]
    size = 0
    for name, item in _tensors(model, dtype):
        if shards[-1] and size + item.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = item
        size += item.nbytes
    return shards


def _tensors(
    model: nn.Module, dtype: torch.dtype | None
) -> Iterator[tuple[str, _Item]]:
    for name, param in model.named_parameters():
        yield name, _Item(param, dtype or param.dtype)
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, _Item(buffer, buffer.dtype)


def _write_shard(path: Path, shard: dict[str, _Item], bar: tqdm[Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, item in shard.items():
        header[name] = {
            "dtype": _DTYPES[item.dtype],
            "shape": list(item.tensor.shape),
            "data_offsets": [offset, offset + item.nbytes],
        }
        offset += item.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for item in shard.values():
            _write_tensor(file, item, bar)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: Any, item: _Item, bar: tqdm[Any]) -> None:
    with item.opened() as values:
        flat = values.cpu().contiguous().view(-1).view(torch.uint8)
        data = memoryview(flat.numpy().data)
        for start in range(0, len(data), _CHUNK_BYTES):
            part = data[start : start + _CHUNK_BYTES]
            file.write(part)
            bar.update(len(part))


def _replace(
    directory: Path,
    names: list[str],
    written: list[Path],
    shards: list[dict[str, _Item]],
    total: int,
) -> None:
    """Put the finished files in place of those of an earlier save; nothing here needs much space."""
    index_name = "model.safetensors.index.json"
    index = directory / f".{index_name}.part"
    if len(names) > 1:
        weight_map = {
            key: name
            for shard, name in zip(shards, names, strict=True)
            for key in shard
        }
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        index.write_text(json.dumps(content, indent=2))
    for path, name in zip(written, names, strict=True):
        path.replace(directory / name)
    if len(names) > 1:
        index.replace(directory / index_name)
    keep = {*names, index_name} if len(names) > 1 else set(names)
    for old in directory.glob("model*.safetensors*"):
        if old.name not in keep:
            old.unlink()
