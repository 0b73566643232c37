"""The tensors of a file that torch.save wrote (.bin), not read yet.

Nothing is unpickled but by torch's ``weights_only`` unpickler, which makes tensors and containers only. Where in the file
their bytes are, torch says; each has to be a whole record of the zip.
"""

from __future__ import annotations

import struct
import zipfile
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain_nb.errors import StoreError
from megatrain_nb.runtime.lazy import LazyTensor, at, lazy
from megatrain_nb.runtime.leaves import (
    DTYPES,
    MOST_NAME,
    FilePart,
    read_bytes,
    tree_of,
)
from megatrain_nb.store.parsing import PICKLE_BYTES
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from megatrain_nb.store.infile import InFile

# A record's own header in a zip: at its end the lengths of the name and of the extra field that follow it.
_ZIP_HEADER = struct.Struct("<26xHH")


def open_bin(file: InFile, most_bytes: int) -> dict[str, LazyTensor]:
    """Return the tensors of a file that torch.save wrote; where they are in it, torch says."""
    path, size = file.path, file.num_bytes()
    zipped = (
        size >= 4 and read_bytes(file, 0, 4) == b"PK\3\4"
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
        why = (str(error) or repr(error)).splitlines()[0][:MOST_NAME]
        msg = f"{path} holds more than tensors, or is damaged: {why}"
        raise StoreError(msg) from error


def _check_plain(path: Path, state: Any) -> None:
    """Refuse what is no table of tensors, or holds one whose numbers are not its bytes: sparse, quantised, negated ones."""
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and len(key) <= MOST_NAME for key in state
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
                header = read_bytes(file, info.header_offset, _ZIP_HEADER.size)
                begin = info.header_offset + _ZIP_HEADER.size
                found[begin + sum(_ZIP_HEADER.unpack(header))] = info.file_size
                continue
            needed = info.file_size * PICKLE_BYTES
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
