"""fp32 as a bf16 half to compute with and a 16-bit half that makes it exact.

[Note: split]
`hi` is the fp32 number rounded to bf16, halves away from zero; `lo` is the low 16 bits
of the number. Read as a signed integer, `lo` is what must be added to ``hi << 16``:

    hi = (bits + 0x8000) >> 16        bits = (hi << 16) + int16(lo)

Every one of the 2**32 patterns comes back bit for bit: signed zeros, denormals,
infinities and every NaN with its payload. Rounding halves to even, as torch does,
cannot be undone: two numbers would share one pair. So `hi` is the bf16 that torch gives
for the number, but

- at a tie (the low half is exactly 0x8000) torch takes the even neighbour, `hi` the one
  further from zero. They differ where the upper 16 bits are even;
- torch turns every NaN into 0x7fc0. Here a quiet NaN, the kind that arithmetic makes,
  keeps its own upper half, which is a NaN too. (The formula alone would turn 0x7fffffff,
  the NaN that CUDA makes, into a zero, so NaNs are not rounded.) The signalling NaNs whose upper half is
  that of infinity (0x7f80 or 0xff80; no arithmetic makes them) have no NaN to go to:
  they look like an infinity, or like a zero of the other sign from low half 0x8000 on.

Rounding up to infinity is as in torch: from 0x7f7f8000 on.

References
----------
Intel's split-SGD keeps the same two halves with truncation; rounding makes `hi` the
weight that mixed precision computes with anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatrain_nb.codec.arrays import check_array
from megatrain_nb.errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Split(NamedTuple):
    """The two halves of N fp32 numbers.

    Attributes
    ----------
    hi
        uint16, shape (N,): the bits of bf16 numbers.
    lo
        uint16, shape (N,): what is missing for fp32, see [Note: split].
    """

    hi: NDArray[np.uint16]
    lo: NDArray[np.uint16]

    @property
    def size(self) -> int:
        """N."""
        return int(getattr(self.hi, "size", 0))

    def part(self, part: slice) -> Split:
        """Return a view of some of the numbers."""
        return Split(self.hi[part], self.lo[part])


def split(master: NDArray[np.float32], halves: Split) -> None:
    """Write the halves of every number.

    Parameters
    ----------
    master : float32, shape (N,), C-contiguous
        Only read.
    halves
        Overwritten.

    Raises
    ------
    ArgumentError
        An array of another kind or length; then nothing has been written.

    Examples
    --------
    >>> halves = Split(np.zeros(2, np.uint16), np.zeros(2, np.uint16))
    >>> split(np.array([1.0, 1 + 2**-8 + 2**-20], np.float32), halves)
    >>> [hex(x) for x in halves.hi], [hex(x) for x in halves.lo]
    (['0x3f80', '0x3f81'], ['0x0', '0x8008'])
    """
    from megatrain_nb.codec import kernels  # noqa: PLC0415

    size = getattr(master, "size", 0)
    check_array("master", master, np.float32, size)
    check_split(halves, size)
    kernels.split(master, halves.hi, halves.lo)


def join(halves: Split, master: NDArray[np.float32]) -> None:
    """Write the numbers that `split` made the halves of, bit for bit.

    Parameters
    ----------
    halves
        Only read.
    master : float32, shape (N,), C-contiguous
        Overwritten.

    Raises
    ------
    ArgumentError
        An array of another kind or length; then nothing has been written.
    """
    from megatrain_nb.codec import kernels  # noqa: PLC0415

    size = getattr(master, "size", 0)
    check_array("master", master, np.float32, size, writeable=True)
    check_split(halves, size, writeable=False)
    kernels.join(halves.hi, halves.lo, master)


def warm_up() -> None:
    """Compile the kernels or load them from the cache."""
    halves = Split(np.zeros(1, np.uint16), np.zeros(1, np.uint16))
    split(np.zeros(1, np.float32), halves)
    join(halves, np.zeros(1, np.float32))


def check_split(halves: object, size: int, *, writeable: bool = True) -> None:
    """Raise ArgumentError unless both halves are uint16 of ``size`` elements."""
    if not isinstance(halves, Split):
        msg = f"the halves are a {type(halves).__name__}; give a Split of two arrays"
        raise ArgumentError(msg)
    check_array("hi", halves.hi, np.uint16, size, writeable=writeable)
    check_array("lo", halves.lo, np.uint16, size, writeable=writeable)
