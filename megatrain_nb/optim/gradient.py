"""bf16 gradients that add up in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.codec.arrays import check_array

if TYPE_CHECKING:
    from numpy.typing import NDArray


def accumulate(
    total: NDArray[np.float32], grad: NDArray[np.uint16], *, first: bool
) -> None:
    """Add a bf16 gradient to an fp32 sum, each number rounded once, in one thread and without a copy.

    torch's ``total.add_(grad)`` gives the same numbers, but on a CPU takes more than ten times as long: it
    converts element by element.

    Parameters
    ----------
    total : float32, shape (N,), C-contiguous
        Overwritten.
    grad : uint16, shape (N,), C-contiguous
        The bits of bf16 numbers; only read.
    first
        The sum begins with this one: what was in ``total`` does not count.

    Raises
    ------
    ArgumentError
        An array of another kind or length; then nothing has been written.

    Examples
    --------
    >>> total = np.full(2, np.nan, np.float32)
    >>> halves = np.array([0x3F80, 0xC000], np.uint16)
    >>> accumulate(total, halves, first=True)
    >>> accumulate(total, halves, first=False)
    >>> total
    array([ 2., -4.], dtype=float32)
    """
    from megatrain_nb.optim import gradient_kernels  # noqa: PLC0415

    size = getattr(total, "size", 0)
    check_array("total", total, np.float32, size, writeable=True)
    check_array("grad", grad, np.uint16, size)
    if first:
        gradient_kernels.widen(total, grad)
    else:
        gradient_kernels.add(total, grad)


def warm_up() -> None:
    """Compile the kernels or load them from the cache, so that no step waits for it."""
    total, grad = np.zeros(1, np.float32), np.zeros(1, np.uint16)
    for first in (True, False):
        accumulate(total, grad, first=first)
