"""A checkpoint on disk as tensors that are not read yet: safetensors or torch's .bin, one file or many.

What a file says of itself is checked before anything is read or allocated by it: lengths against the file's own, names
of files against the folder.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.runtime.binfile import open_bin
from megatrain_nb.runtime.lazy import at, lazy, num_bytes
from megatrain_nb.runtime.leaves import DTYPES, MOST_NAME, FilePart, read_bytes
from megatrain_nb.store.infile import InFile
from megatrain_nb.store.parsing import parse_json
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from megatrain_nb.runtime.lazy import LazyTensor

# The safetensors format (https://github.com/huggingface/safetensors, "Format"). Its library opens a file as memory,
# and does not say where in it a tensor is; here the bytes are read into the place where they belong.
_MOST_HEADER_BYTES = 32 << 20
_MOST_INDEX_BYTES = 64 << 20
_MOST_DIMS = 64
_MOST_FILE_NAME = 255
# What a tensor that is not read yet takes in RAM.
_TENSOR_BYTES = 3000

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
OLD, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def open_checkpoint(
    folder: Path, *, variant: str | None = None, most_bytes: int
) -> dict[str, LazyTensor]:
    """Find a folder's weights, and return its tensors by the names in its files, not read yet.

    Parameters
    ----------
    folder
        With ``model.safetensors``, or ``model.safetensors.index.json`` and its shards, or the same as
        ``pytorch_model.bin``.
    variant
        As in ``model.fp16.safetensors``.
    most_bytes
        What may be taken of RAM: by what the files say of themselves, and by a .bin of before torch 1.6, which can only
        be read whole.

    Raises
    ------
    ArgumentError
        No weights there.
    StoreError
        A file is missing, too short, or does not say what it should: names it. Or that takes more RAM than it may.
    """
    for single, index in ((SAFE, SAFE_INDEX), (OLD, OLD_INDEX)):
        for name in (single, index):
            path = folder / _with_variant(name, variant)
            if _is_file(path):
                return _open(folder, path, sharded=name == index, most_bytes=most_bytes)
    names = ", ".join(_with_variant(x, variant) for x in (SAFE, SAFE_INDEX, OLD, OLD_INDEX))  # fmt: skip
    msg = f"{folder} holds none of {names}; give the folder that save_pretrained wrote"
    raise ArgumentError(msg)


def _open(
    folder: Path, path: Path, *, sharded: bool, most_bytes: int
) -> dict[str, LazyTensor]:
    weight_map = _read_index(path, most_bytes) if sharded else {}
    wanted: dict[str, list[str]] = {} if sharded else {path.name: []}
    for key, name in weight_map.items():
        wanted.setdefault(name, []).append(key)
    found: dict[str, LazyTensor] = {}
    for name, keys in wanted.items():
        file = InFile(folder / name)
        if not _is_file(file.path):
            msg = f"{path} names {name!r}, which is not in {folder}; fetch the missing shard again"
            raise StoreError(msg)
        left = most_bytes - len(found) * _TENSOR_BYTES
        tensors = (
            open_file(file, most_bytes=left)
            if name.endswith(".safetensors")
            else open_bin(file, left)
        )
        for key in keys:
            if key not in tensors:
                msg = f"{path} says that {key!r} is in {name}, and it is not; the folder is not whole"
                raise StoreError(msg)
        found.update({key: x for key, x in tensors.items()
                      if weight_map.get(key, name) == name})  # fmt: skip
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # its name is too long, or its folder may not be searched
        msg = f"{path}: {error.strerror}"
        raise StoreError(msg) from error


def _with_variant(name: str, variant: str | None) -> str:
    if not variant:
        return name
    first, _, rest = name.partition(".")
    return f"{first}.{variant}.{rest}"


def _read_index(path: Path, most_bytes: int) -> dict[str, str]:
    """Return which file each tensor is in."""
    file = InFile(path)
    size = file.num_bytes()
    if size > _MOST_INDEX_BYTES:
        msg = f"{path} is {format_bytes(size)} long, which no index is"
        raise StoreError(msg)
    content = _parse(read_bytes(file, 0, size), path, most_bytes)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        msg = f"{path} has no weight_map, which says what is in which file"
        raise StoreError(msg)
    if not isinstance(content.get("metadata", {}), dict):
        msg = f"{path} has metadata that is no table; it is damaged"
        raise StoreError(msg)
    for name in weight_map.values():
        if not isinstance(name, str):
            msg = f"{path} names a {type(name).__name__}, which is no file in the same folder; it is not read"
            raise StoreError(msg)
        plain = name not in ("", ".", "..") and len(name) <= _MOST_FILE_NAME
        if not plain or name != Path(name).name or "\\" in name or "\0" in name:
            msg = f"{path} names {name[:MOST_NAME]!r}, which is no file in the same folder; it is not read"
            raise StoreError(msg)
        if not name.endswith((".safetensors", ".bin")):
            msg = f"{path} names {name[:MOST_NAME]!r}, which is neither .safetensors nor .bin"
            raise StoreError(msg)
    return weight_map


def open_file(file: InFile, *, most_bytes: int) -> dict[str, LazyTensor]:
    """Return the tensors of one safetensors file, each checked against the file's length.

    Raises
    ------
    StoreError
        It is missing or damaged, or what it says of its tensors takes more than ``most_bytes`` of RAM.
    """
    path, size = file.path, file.num_bytes()
    if size < 8:
        msg = (
            f"{path} is {size} bytes long, so it is no safetensors file; fetch it again"
        )
        raise StoreError(msg)
    length = int.from_bytes(read_bytes(file, 0, 8), "little")
    if length > min(size - 8, _MOST_HEADER_BYTES):
        msg = (
            f"{path} announces a header of {length} bytes, the file is {size} bytes long and a header at most "
            f"{_MOST_HEADER_BYTES}; it is damaged, or no safetensors file"
        )
        raise StoreError(msg)
    header = _parse(read_bytes(file, 8, length), path, most_bytes, _TENSOR_BYTES)
    metadata = header.pop("__metadata__", None)
    texts = isinstance(metadata, dict) and all(isinstance(x, str) for x in metadata.values())  # fmt: skip
    if metadata is not None and not texts:
        msg = f"{path}: its metadata are not a table of texts; it is damaged"
        raise StoreError(msg)
    parts = {key: _part(file, key, entry, 8 + length) for key, entry in header.items()}
    end = 8 + length
    for part in sorted(parts.values(), key=lambda x: (x.offset_bytes, num_bytes(x))):
        if part.offset_bytes != end:
            msg = f"{path}: {part.name} begins at byte {part.offset_bytes} and the one before ends at {end}; it is damaged"
            raise StoreError(msg)
        end += num_bytes(part)
    if end != size:
        what = "truncated" if end > size else "damaged"
        msg = f"{path} is {what}: its tensors end at byte {end}, the file is {size} bytes long; fetch it again"
        raise StoreError(msg)
    return {key: lazy(at(part)) for key, part in parts.items()}


def _part(file: InFile, key: str, entry: Any, begin: int) -> FilePart:
    """Check what a header says of one tensor."""
    good = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    if good:
        shape, offsets, kind = entry["shape"], entry["data_offsets"], entry["dtype"]
        lists = isinstance(shape, list) and isinstance(offsets, list)
        good = lists and len(shape) <= _MOST_DIMS and len(offsets) == 2
        good = good and all(type(x) is int and 0 <= x < 2**63 for x in (*shape, *offsets))  # fmt: skip
        good = good and isinstance(kind, str)
        # Also of a tensor without elements torch multiplies all lengths.
        good = good and math.prod(max(x, 1) for x in shape) < 2**59
    if not good:
        msg = f"{file.path}: what it says of {key!r} is not dtype, shape and data_offsets; it is damaged"
        raise StoreError(msg)
    if kind not in DTYPES:
        msg = f"{file.path}: {key!r} is {kind[:80]!r}, which cannot be read here; known are {', '.join(DTYPES)}"
        raise StoreError(msg)
    dtype = DTYPES[kind]
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        msg = (
            f"{file.path}: {key!r} has shape {shape} of {kind}, which are {math.prod(shape) * dtype.itemsize} bytes, and "
            f"{offsets[1] - offsets[0]} bytes in the file; it is damaged"
        )
        raise StoreError(msg)
    return FilePart(key, file, begin + offsets[0], tuple(shape), dtype)


def _parse(
    text: bytes, path: Path, most_bytes: int, table_bytes: int = 0
) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            msg = "a name comes twice"
            raise ValueError(msg)
        for name in table:
            name.encode()  # what no UTF-8 can say, an escape may: half of a character
            if len(name) > MOST_NAME:
                msg = f"a name is {len(name)} characters long"
                raise ValueError(msg)
        return table

    try:
        content = parse_json(
            text, most_bytes=most_bytes, table_bytes=table_bytes, pairs=once
        )
    except ValueError as error:
        msg = f"{path}: {error}; it is damaged, or max_ram_gb is too small for it"
        raise StoreError(msg) from error
    if not isinstance(content, dict):
        msg = f"{path} is not a table; it is damaged"
        raise StoreError(msg)
    return content
