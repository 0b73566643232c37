"""The contract of a store: tiles of bytes by key, moved asynchronously.

A store knows bytes and names only; what the bytes mean is the codec's business.

- ``put`` and ``get_into`` return at once with a future. Until it is done, the array
  belongs to the store: do not write to the data of a put, do not touch the output of a
  get. Arrays are ``uint8`` and C-contiguous; page-aligned ones whose length is a
  multiple of 4096 (all slabs of a `HostPool`) move without a copy.
- Whole versions only. A get sees the version that is current when its turn comes: the
  old or the new one, never a mix. A put that fails leaves the old version in place. Of
  several puts of one key the one submitted last wins, however they finish.
- ``get_into`` takes exactly ``nbytes(key)`` bytes and verifies the checksum.
- Wrong arguments, an unknown key and a closed store raise at the call; whatever the
  medium does comes out of the future.
- Every method may be called from any thread. ``close`` is idempotent; afterwards every
  other call raises `StoreError`.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from megatrain_nb.errors import StoreError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")

ALIGN_BYTES = 4096
"""Unit of addresses, lengths and file offsets that direct I/O accepts everywhere."""


def round_up(nbytes: int) -> int:
    """Return the next multiple of `ALIGN_BYTES`.

    Examples
    --------
    >>> round_up(1), round_up(4096), round_up(4097)
    (4096, 4096, 8192)
    """
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class IoRecord:
    """One finished transfer of one tile.

    Attributes
    ----------
    op
        ``READ`` or ``WRITE``.
    nbytes
        What the disk moved: of a packed tile its packed length.
    start_s, end_s
        ``time.perf_counter()`` seconds of the transfer, without the time in the queue, the
        wait for space and the checksum. Packing and unpacking are part of it.
    """

    op: str
    key: str
    nbytes: int
    start_s: float
    end_s: float


class Store(Protocol):
    """Tiles of bytes by key; the module docstring is the contract."""

    def put(
        self, key: str, data: NDArray[np.uint8], *, codec: str = "raw"
    ) -> Future[None]:
        """Store the bytes of `data` under `key`, as a new version.

        ``codec`` is kept with them. A store may pack what is put with one of
        `megatrain_nb.codec.lossless`; a get gives the very bytes that were put.
        """
        ...

    def get_into(self, key: str, out: NDArray[np.uint8]) -> Future[None]:
        """Fill `out` with the tile and verify its checksum."""
        ...

    def delete(self, key: str) -> None:
        """Forget the tile; gets already running still see it whole."""
        ...

    def __contains__(self, key: object) -> bool: ...

    def nbytes(self, key: str) -> int:
        """Return the length of the tile in bytes, as it was put."""
        ...

    def keys(self) -> list[str]:
        """Return the keys, sorted."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes that tiles occupy, old versions still held included."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Most bytes the store has occupied on its medium."""
        ...

    def close(self) -> None:
        """Finish what is running and give everything back; idempotent."""
        ...


def wait(future: Future[T], *, what: str, timeout_s: float = 60.0) -> T:
    """Return the result of `future`; no wait is endless.

    Parameters
    ----------
    what
        What is waited for, as the error should name it: ``"read of layers.3"``.

    Raises
    ------
    StoreError
        Not done after `timeout_s` seconds, or cancelled because the store was closed.
    """
    try:
        return future.result(timeout_s)
    except CancelledError:
        msg = f"{what} was cancelled: the store was closed before its turn came"
        raise StoreError(msg) from None
    except TimeoutError:
        if future.done():  # at this very moment, or the error is its own
            return future.result()
        state = "running" if future.running() else "still queued"
        msg = (
            f"{what} is {state} after {timeout_s:g} s. The disk is stalled or far slower "
            "than planned: look for I/O errors in the kernel log, other programs on this "
            "disk, and whether the directory is on a network file system"
        )
        raise StoreError(msg) from None
