"""A checkpoint on disk as tensors that are not read yet: safetensors or torch's .bin, one file or many.

What a file says of itself is checked before anything is read or allocated by it: lengths against the file's own, names
of files against the folder. Nothing is unpickled but by torch's ``weights_only`` unpickler, which makes tensors
and containers only.
"""

from __future__ import annotations

import math
import struct
import zipfile
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.runtime.lazy import LazyTensor, at, lazy, node_of, num_bytes
from megatrain_nb.store.infile import InFile
from megatrain_nb.store.parsing import parse_json
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from megatrain_nb.runtime.lazy import Node, Shape

# The safetensors format (https://github.com/huggingface/safetensors, "Format"). Its library opens a file as memory,
# and does not say where in it a tensor is; here the bytes are read into the place where they belong.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
_MOST_HEADER_BYTES = 32 << 20
_MOST_INDEX_BYTES = 64 << 20
_MOST_DIMS = 64
_MOST_NAME, _MOST_FILE_NAME = 1000, 255
# What a tensor that is not read yet takes in RAM, and what each byte of a pickle may take (an empty list and its mark).
_TENSOR_BYTES, _PICKLE_BYTES = 3000, 128

# A record's own header in a zip: at its end the lengths of the name and of the extra field that follow it.
_ZIP_HEADER = struct.Struct("<26xHH")

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
OLD, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class FilePart:
    """A stretch of a file that holds a tensor, row by row."""

    name: str
    file: InFile
    offset_bytes: int
    shape: Shape
    dtype: torch.dtype

    @contextmanager
    def read(self, start: int, stop: int) -> Iterator[Tensor]:
        """Give elements ``start`` to ``stop``, a flat tensor of its own."""
        values = torch.empty(stop - start, dtype=self.dtype)
        self.read_into(values, start)
        yield values

    def read_into(self, values: Tensor, start: int) -> None:
        """Fill a flat, contiguous tensor of the same dtype with the elements from ``start`` on."""
        bits: Any = values.detach().view(torch.uint8).numpy()
        data = memoryview(bits).cast("B")
        self.file.read_into(data, self.offset_bytes + start * self.dtype.itemsize)

    def part(self, offset: int, shape: Shape) -> FilePart:
        """Return a stretch of it that begins at element ``offset``."""
        first = self.offset_bytes + offset * self.dtype.itemsize
        return replace(self, offset_bytes=first, shape=shape)


@dataclass(frozen=True)
class InRam:
    """Values that are in RAM already, or in a mapped file."""

    name: str
    values: Tensor
    shape: Shape

    @property
    def dtype(self) -> torch.dtype:
        """What the values are."""
        return self.values.dtype

    @contextmanager
    def read(self, start: int, stop: int) -> Iterator[Tensor]:
        """Give elements ``start`` to ``stop``."""
        yield self.values.detach().reshape(-1)[start:stop]

    def part(self, offset: int, shape: Shape) -> InRam:
        """Return a stretch of it that begins at element ``offset``."""
        flat = self.values.detach().reshape(-1)
        return InRam(self.name, flat[offset : offset + math.prod(shape)], shape)


def tree_of(name: str, tensor: Tensor) -> Node:
    """Return a tensor as a tree: that of a lazy one, or its values in RAM."""
    return node_of(tensor) or at(InRam(name, tensor, tuple(tensor.shape)))


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
            else _read_bin(file, left)
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
    content = _parse(_read_text(file, 0, size), path, most_bytes)
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
            msg = f"{path} names {name[:_MOST_NAME]!r}, which is no file in the same folder; it is not read"
            raise StoreError(msg)
        if not name.endswith((".safetensors", ".bin")):
            msg = f"{path} names {name[:_MOST_NAME]!r}, which is neither .safetensors nor .bin"
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
    length = int.from_bytes(_read_text(file, 0, 8), "little")
    if length > min(size - 8, _MOST_HEADER_BYTES):
        msg = (
            f"{path} announces a header of {length} bytes, the file is {size} bytes long and a header at most "
            f"{_MOST_HEADER_BYTES}; it is damaged, or no safetensors file"
        )
        raise StoreError(msg)
    header = _parse(_read_text(file, 8, length), path, most_bytes, _TENSOR_BYTES)
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


def _read_text(file: InFile, offset: int, length: int) -> bytes:
    text = bytearray(length)
    file.read_into(memoryview(text), offset)
    return bytes(text)


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
            if len(name) > _MOST_NAME:
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


def _read_bin(file: InFile, most_bytes: int) -> dict[str, LazyTensor]:
    """Return the tensors of a file that torch.save wrote; where they are in it, torch says."""
    path, size = file.path, file.num_bytes()
    zipped = (
        size >= 4 and _read_text(file, 0, 4) == b"PK\3\4"
    )  # as torch tells them apart
    if not zipped and 3 * size > most_bytes:
        msg = (
            f"{path} is in the format of before torch 1.6, which can only be read whole: that takes up to "
            f"{format_bytes(3 * size)} of RAM, and max_ram_gb allows {format_bytes(most_bytes)}. Write it anew on a larger "
            "machine with torch.save(torch.load(path, weights_only=True), path), or raise max_ram_gb"
        )
        raise StoreError(msg)
    try:
        records = _records(file, most_bytes) if zipped else {}
        with FakeTensorMode() if zipped else nullcontext():
            state = torch.load(path, map_location="cpu", weights_only=True)
        _check_plain(path, state)
        if not zipped:
            return {key: lazy(tree_of(key, value)) for key, value in state.items()}
        return {key: _stored(file, key, x, records) for key, x in state.items()}
    except StoreError:
        raise
    except Exception as error:  # whatever a damaged or hostile file makes of it
        why = (str(error) or repr(error)).splitlines()[0][:_MOST_NAME]
        msg = f"{path} holds more than tensors, or is damaged: {why}"
        raise StoreError(msg) from error


def _check_plain(path: Path, state: Any) -> None:
    """Refuse what is no table of tensors, or holds one whose numbers are not its bytes: sparse, quantised, negated ones."""
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and len(key) <= _MOST_NAME for key in state
    ):
        msg = f"{path} holds no table of tensors by name"
        raise StoreError(msg)
    for key, value in state.items():
        if not isinstance(value, Tensor):
            msg = f"{path}: {key!r} is a {type(value).__name__}, not a tensor"
            raise StoreError(msg)
        plain = value.layout is torch.strided and value.device.type == "cpu"
        if not plain or value.dtype not in DTYPES.values() or value.is_neg():
            kind = f"{value.dtype}, {value.layout}, on {value.device.type}"
            msg = f"{path}: {key!r} is a tensor of a kind that cannot be read here ({kind})"
            raise StoreError(msg)


def _records(file: InFile, most_bytes: int) -> dict[int, int]:
    """Return where in a zip the bytes of each storage begin, and how many they are.

    Raises
    ------
    ValueError, zipfile.BadZipFile
        They are not in the file as they are in memory, or the rest does not fit there, or is damaged.
    """
    found = {}
    with zipfile.ZipFile(file.path) as content:
        for info in content.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                msg = f"{info.filename} is compressed, which torch.save never does"
                raise ValueError(msg)
            if "/data/" in info.filename:
                content.open(info).close()  # its two headers agree
                header = _read_text(file, info.header_offset, _ZIP_HEADER.size)
                begin = info.header_offset + _ZIP_HEADER.size
                found[begin + sum(_ZIP_HEADER.unpack(header))] = info.file_size
                continue
            needed = info.file_size * _PICKLE_BYTES
            if needed > most_bytes:
                msg = f"reading {info.filename} may take {format_bytes(needed)} of RAM, {format_bytes(most_bytes)} are allowed"  # fmt: skip
                raise ValueError(msg)
            text = content.read(info)  # with its checksum, at which torch does not look
            if info.filename.endswith("/byteorder") and text != b"little":
                msg = "its bytes are in the order of another kind of machine"
                raise ValueError(msg)
    return found


def _stored(
    file: InFile, key: str, value: Tensor, records: Mapping[int, int]
) -> LazyTensor:
    """Return a tensor of a .bin as the stretch of the file that it is."""
    storage: Any = value.untyped_storage()
    begin = int(storage._checkpoint_offset)
    if records.get(begin) != storage.nbytes():
        msg = (
            f"{file.path} is truncated or damaged: {key!r} should be {storage.nbytes()} bytes from byte {begin} on, and no "
            "record of the file is; fetch it again"
        )
        raise StoreError(msg)
    whole = (storage.nbytes() // value.dtype.itemsize,)
    base = lazy(at(FilePart(key, file, begin, whole, value.dtype)))
    strided: Any = torch.as_strided(
        base, tuple(value.shape), value.stride(), int(value.storage_offset())
    )
    stored: LazyTensor = strided
    return stored
