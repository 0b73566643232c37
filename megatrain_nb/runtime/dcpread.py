"""Reads a folder of torch.distributed.checkpoint from anywhere, and runs nothing that is in it.

[Note: no code from a DCP folder] DCP's ``.metadata`` is a pickle, and to unpickle is to run what it says. So torch's
own reader does not get to see that file. Here its opcodes are looked at first: only those that build texts,
numbers, tuples, lists, dicts and records. Then it is unpickled with names resolved by a short list, to inert
stand-ins that exist for this one file: no function and no class of torch's or anybody's is called. What comes out is
checked (sizes, boxes that are the tensor exactly, places inside regular files of the folder) and made into torch's
metadata, from which torch's reader goes on. Chunks are zip archives; they are looked at before torch reads them,
with ``weights_only=True``, so that none unpacks to more than it is long.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import stat
import zipfile
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    _StorageInfo,  # what torch's reader takes; DCP has no public name for it
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.store.infile import read_regular
from megatrain_nb.store.parsing import PICKLE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

METADATA_NAME = ".metadata"
_MAX_OBJECT_BYTES = 2**24
_MAX_DIMS = 64
_MAX_CHUNKS = 2**20
_MAX_BOXES = 1024
_MAX_SIZE = 2**48
_FILE = re.compile(r"[\w-][\w.-]*")
_DTYPES = {
    str(x).removeprefix("torch."): x
    for x in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # Where it was written, and the memory layout: not looked at.
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "torch.serialization": ("_get_layout",),
}
# Those of protocols 4 and 5 that data is made of. No PUT: its number may ask for any amount of memory.
_OPCODES = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "MEMOIZE", "BINGET", "LONG_BINGET",
    "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD",
})  # fmt: skip


class Folder:
    """A DCP folder whose metadata was read and checked.

    Parameters
    ----------
    path
        The folder.
    most_bytes
        What its metadata may take of RAM.

    Attributes
    ----------
    tensors
        Shape and dtype by key.
    objects
        Keys of what is not a tensor.

    Raises
    ------
    ArgumentError
        It is no such folder.
    StoreError
        It is damaged, holds what no such folder holds, or takes more RAM than it may.
    """

    def __init__(self, path: Path, *, most_bytes: int = 2**30) -> None:
        self.path = path
        data = _read_metadata(path, most_bytes)
        try:
            metadata = _checked(_unpickled(data), path)
        except StoreError:
            raise
        except (
            Exception
        ) as error:  # whatever a pickle that is none leads to, it is damage
            _refuse(path, f"{METADATA_NAME} cannot be read: {error!r}")
        self._metadata = metadata
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(metadata, True)
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.objects: set[str] = set()
        for key, each in metadata.state_dict_metadata.items():
            if isinstance(each, TensorStorageMetadata):
                self.tensors[key] = tuple(each.size), each.properties.dtype
            else:
                self.objects.add(key)

    def read_into(self, key: str, values: Tensor) -> None:
        """Fill a tensor of the same shape, one chunk in RAM at a time; other dtypes are converted.

        Raises
        ------
        StoreError
            A chunk is damaged, or the disk failed.
        """
        shape = torch.Size(self.tensors[key][0])
        assert values.shape == shape, key
        whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
        found = self._metadata.state_dict_metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        items = create_read_items_for_chunk_list(key, found, [whole])
        self._read(key, items, _Into(values))

    def read_object(self, key: str) -> Any:
        """Return what is not a tensor: numbers, texts, lists and dicts.

        Raises
        ------
        StoreError
            It is damaged, too large, or anything else.
        """
        index = MetadataIndex(key)
        length = self._metadata.storage_data[index].length
        if length > _MAX_OBJECT_BYTES:
            _refuse(self.path, f"{key} takes {length} bytes, which no setting does")
        zero = torch.Size([0])
        item = ReadItem(
            type=LoadItemType.BYTE_IO, dest_index=index, dest_offsets=zero, storage_index=index, storage_offsets=zero,
            lengths=torch.Size([length]),
        )  # fmt: skip
        target = _Into(torch.empty(0))
        self._read(key, [item], target)
        return target.found

    def _read(self, key: str, items: list[ReadItem], planner: _Into) -> None:
        try:
            for item in items:
                self._check_archive(item.storage_index)
            self._reader.read_data(LoadPlan(items), planner).wait()
        except StoreError:
            raise
        except OSError as error:
            _refuse(self.path, f"{key}: {error.strerror or error}")
        except Exception as error:
            _refuse(self.path, f"{key} cannot be read: {error!r}")

    def _check_archive(self, index: MetadataIndex) -> None:
        """Refuse a chunk that is not an archive, or one that would take more memory than it is long."""
        place = self._metadata.storage_data[index]
        with (self.path / place.relative_path).open("rb") as file:
            part = _Part(file, place.offset, place.length)
            with zipfile.ZipFile(part) as archive:
                entries = archive.infolist()
        if any(each.compress_type != zipfile.ZIP_STORED for each in entries) or (
            sum(each.file_size for each in entries) > place.length
        ):
            _refuse(self.path, f"{index.fqn} is a compressed archive")


class _Into(DefaultLoadPlanner):
    """Lets torch's reader write into one tensor, or takes one object."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self._values = values
        self.found: Any = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._values


class _Part(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, (0, self._at, self._length)[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        wanted = min(len(buffer), max(0, self._length - self._at))
        found = self._file.read(wanted)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


# -- the metadata -------------------------------------------------------------------------------------


class _Record:
    """What a pickle makes in place of a class of torch's: a name, what it was called with, and its state."""

    kind = ""

    def __new__(cls, *args: Any) -> _Record:
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Resolves names to stand-ins that nothing else uses, so that changing one changes nothing."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._made: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and (name in _DTYPES or name == "strided"):
            return name
        if name not in _RECORDS.get(module, ()):
            msg = f"it names {module}.{name}, which does not belong into it"
            raise pickle.UnpicklingError(msg[:300])
        key = module, name
        if key not in self._made:
            self._made[key] = type(name, (_Record,), {"kind": name})
        return self._made[key]

    def persistent_load(self, _: Any) -> NoReturn:
        msg = "it refers to something outside"
        raise pickle.UnpicklingError(msg)


def _unpickled(data: bytes) -> Any:
    for opcode, _, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            msg = f"it has the opcode {opcode.name}, which data does not need"
            raise pickle.UnpicklingError(msg)
    return _Unpickler(data).load()


def _read_metadata(path: Path, most_bytes: int) -> bytes:
    file = path / METADATA_NAME
    try:
        if not stat.S_ISDIR(path.lstat().st_mode) or not file.exists():
            msg = (
                f"{path} is not a folder of torch.distributed.checkpoint: it has no {METADATA_NAME}. Give the folder that "
                "mt.export_distributed or torch.distributed.checkpoint.save wrote"
            )
            raise ArgumentError(msg)
        return read_regular(file, most_bytes // PICKLE_BYTES)
    except FileNotFoundError:
        msg = f"{path} is not there"
        raise ArgumentError(msg) from None
    except OSError as error:
        _refuse(path, f"{METADATA_NAME}: {error.strerror}")


def _checked(root: Any, path: Path) -> Metadata:
    """Make torch's metadata of what was unpickled.

    Raises
    ------
    ValueError, KeyError, TypeError, AttributeError
        It is not what it should be.
    """
    content = _fields(root, "Metadata")
    places: dict[MetadataIndex, _StorageInfo] = {}
    sizes: dict[str, int] = {}
    for index, place in content["storage_data"].items():
        one, other = _fields(index, "MetadataIndex"), _fields(place, "_StorageInfo")
        offset = None if one.get("offset") is None else _size(one["offset"])
        key = MetadataIndex(_text(one["fqn"]), offset)
        places[key] = _place(other, path, sizes)
    found: dict[str, Any] = {}
    num_chunks = 0
    for key, each in content["state_dict_metadata"].items():
        if each.kind == "BytesStorageMetadata":
            found[_text(key)] = BytesStorageMetadata()
            wanted = {MetadataIndex(key): 0}
        else:
            found[_text(key)] = tensor = _tensor(_fields(each, "TensorStorageMetadata"))
            num_chunks += len(tensor.chunks)
            if num_chunks > _MAX_CHUNKS:
                msg = f"more than {_MAX_CHUNKS} chunks"
                raise ValueError(msg)
            itemsize = tensor.properties.dtype.itemsize
            wanted = {
                MetadataIndex(key, chunk.offsets): chunk.sizes.numel() * itemsize
                for chunk in tensor.chunks
            }
        for where, nbytes in wanted.items():
            if where not in places or places[where].length < nbytes:
                msg = f"{key[:200]} has a chunk of {nbytes} bytes that is in no file"
                raise ValueError(msg)
    return Metadata(state_dict_metadata=found, storage_data=places)


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or record.kind != kind:
        msg = f"a {type(record).__name__} where a {kind} should be"
        raise ValueError(msg)
    state = record.state
    if not isinstance(state, dict):
        msg = f"a {kind} without fields"
        raise ValueError(msg)  # noqa: TRY004 - a fault of the file, not of the program
    return state


def _text(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 1000:
        msg = "a key that is not a text"
        raise ValueError(msg)
    return value


def _count(value: Any, limit: int = _MAX_SIZE) -> int:
    if type(value) is not int or not 0 <= value < limit:
        msg = f"a number {str(value)[:80]}"
        raise ValueError(msg)
    return value


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple) or len(value) > _MAX_DIMS:
        msg = "a shape that is none"
        raise ValueError(msg)
    return torch.Size([_count(each) for each in value])


def _place(fields: dict[str, Any], path: Path, sizes: dict[str, int]) -> _StorageInfo:
    name = fields["relative_path"]
    if fields.get("transform_descriptors"):
        msg = "chunks that were transformed (compressed) cannot be read"
        raise ValueError(msg)
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        msg = f"a file is called {str(name)[:80]!r}"
        raise ValueError(msg)
    if name not in sizes:
        try:
            status = (path / name).lstat()
        except FileNotFoundError:
            _refuse(path, f"{name} is missing; bring the whole folder over")
        if not stat.S_ISREG(status.st_mode):
            msg = f"{name} is not a regular file"
            raise ValueError(msg)
        sizes[name] = status.st_size
    offset, length = _count(fields["offset"]), _count(fields["length"])
    if not 0 < length <= sizes[name] - offset:
        _refuse(path, f"{name} is cut short, or {METADATA_NAME} is damaged: a chunk ends at its byte {offset + length}, and it has {sizes[name]}")  # fmt: skip
    return _StorageInfo(name, offset, length)


def _tensor(fields: dict[str, Any]) -> TensorStorageMetadata:
    dtype = fields["properties"].state[0]
    shape = _size(fields["size"])
    chunks = [
        ChunkStorageMetadata(_size(each["offsets"]), _size(each["sizes"]))
        for each in (_fields(x, "ChunkStorageMetadata") for x in fields["chunks"])
    ]
    if not are_exactly(shape, chunks):
        msg = f"chunks that are not a tensor of shape {tuple(shape)}"
        raise ValueError(msg)
    return TensorStorageMetadata(TensorProperties(_DTYPES[dtype]), shape, chunks)


def are_exactly(shape: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether boxes cover a shape, each element once.

    Examples
    --------
    >>> whole, half = torch.Size([4, 2]), torch.Size([2, 2])
    >>> boxes = [ChunkStorageMetadata(torch.Size([i, 0]), half) for i in (2, 0)]
    >>> are_exactly(whole, boxes), are_exactly(whole, boxes[:1] * 2)
    (True, False)
    """
    if not chunks or shape.numel() >= _MAX_SIZE:
        return False
    if any(len(box) != len(shape) for x in chunks for box in (x.offsets, x.sizes)):
        return False
    as_table = (len(chunks), len(shape))
    begin = np.array([x.offsets for x in chunks], np.int64).reshape(as_table)
    end = begin + np.array([x.sizes for x in chunks], np.int64).reshape(as_table)
    inside = bool((end <= np.array(shape, np.int64)).all())
    if not inside or sum(x.sizes.numel() for x in chunks) != shape.numel():
        return False
    # Of boxes inside, as large together as the shape, only overlapping ones leave something out.
    cut = [dim for dim, size in enumerate(shape) if (end - begin)[:, dim].min() < size]
    if len(cut) == 1:
        order = np.argsort(begin[:, cut[0]], kind="stable")
        first, last = begin[order, cut[0]], end[order, cut[0]]
        return bool((last[:-1] <= first[1:]).all())
    if len(chunks) > _MAX_BOXES:
        return False
    overlap = ~np.eye(len(chunks), dtype=bool)
    for dim in range(len(shape)):
        starts_before = begin[:, None, dim] < end[None, :, dim]
        overlap &= starts_before & starts_before.T
    return not overlap.any()


def _refuse(path: Path, why: str) -> NoReturn:
    msg = (
        f"{path} cannot be read as a torch.distributed.checkpoint folder: {why[:1000]}"
    )
    raise StoreError(msg)
