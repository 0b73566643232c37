"""Where the values of lazy tensors lie: in a stretch of a file, or in RAM."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megatrain_nb.runtime.lazy import at, node_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from megatrain_nb.runtime.lazy import Node, Shape
    from megatrain_nb.store.infile import InFile

MOST_NAME = 1000
# What can be read, by the names that safetensors has.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip


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


def read_bytes(file: InFile, offset: int, length: int) -> bytes:
    """Return a stretch of a file."""
    text = bytearray(length)
    file.read_into(memoryview(text), offset)
    return bytes(text)
