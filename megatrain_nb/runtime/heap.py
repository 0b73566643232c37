"""Let freed memory go back to the system, so that a budget is one in what the kernel counts."""

from __future__ import annotations

import ctypes
import sys

from megatrain_nb.plan.reserve import large_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def return_freed_memory(max_ram_bytes: int) -> bool:
    """Have glibc map every large allocation by itself, and give the end of its heap back; whether it can.

    Parameters
    ----------
    max_ram_bytes
        The budget; it says what is large (`large_bytes`), and as much may be free at the heap's end.

    Notes
    -----
    By default glibc raises the limit from which an allocation is mapped to the largest size it has
    seen freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD): what is below stays in its heap, in pieces.
    A lower limit keeps less, but every mapping is filled page by page again: measured on a Llama of
    120 M parameters, 2 x 256 tokens, 1 MiB made a step 1.4 times as long, 16 MiB did not.
    """
    if not sys.platform.startswith("linux"):
        return False
    large = large_bytes(max_ram_bytes)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, large) and mallopt(_M_TRIM_THRESHOLD, large))


def trim() -> None:
    """Give free pages of the heap back."""
    if sys.platform.startswith("linux"):
        trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim_heap is not None:
            trim_heap(0)
