"""What arrays must be before a kernel gets them: kernels check nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


def check_array(
    name: str, array: object, dtype: DTypeLike, size: int, *, writeable: bool = False
) -> None:
    """Raise ArgumentError unless ``array`` is flat, contiguous and of this kind."""
    dtype = np.dtype(dtype)
    allowed = f"a C-contiguous {dtype} array of shape ({size},)"
    if not isinstance(array, np.ndarray):
        msg = f"{name} is a {type(array).__name__}; give {allowed}"
        raise ArgumentError(msg)
    if array.dtype != dtype or array.shape != (size,):
        msg = f"{name} is {array.dtype} of shape {array.shape}; give {allowed}"
        raise ArgumentError(msg)
    if not array.flags.c_contiguous:
        msg = f"{name} is not contiguous (strides {array.strides}); give {allowed}"
        raise ArgumentError(msg)
    if writeable and not array.flags.writeable:
        msg = f"{name} is read-only, and it is to be overwritten; give a copy"
        raise ArgumentError(msg)
