"""Where blocks compute: in place on host memory, or on copies in slots of another memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatrain_nb.errors import ArgumentError, BudgetError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatrain_nb.runtime.pager import Values


def tensor_over(host: Values) -> Tensor:
    """Return a tensor over a piece's memory: float32, or bfloat16 over the halves of a split pack."""
    tensor = torch.from_numpy(host)
    return tensor if tensor.dtype == torch.float32 else tensor.view(torch.bfloat16)


class Device(Protocol):
    """The whole difference between a CPU and an accelerator, for the runtime."""

    torch_device: torch.device
    in_place: bool
    peak_bytes: int

    def onload(self, host: Values) -> Tensor:
        """Return a pack's flat weights, float32 or bfloat16 (numel,), where the block computes."""

    def release(self, flat: Tensor) -> None:
        """End the use of what ``onload`` returned; the memory may be reused."""

    def gradient_home(self, host: NDArray[np.float32]) -> Tensor | None:
        """Return where gradients may accumulate in place, or None if they must be offloaded."""

    def used_bytes(self) -> int:
        """Device memory held for slots, in bytes; 0 where it is the host's."""

    def close(self) -> None:
        """Give everything back."""


class HostDevice:
    """The CPU: a block computes on the very bytes that were read, without a second copy."""

    in_place = True
    peak_bytes = 0

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def onload(self, host: Values) -> Tensor:
        """Return a view of the host memory."""
        return tensor_over(host)

    def release(self, flat: Tensor) -> None:
        """Nothing to give back: the slab belongs to the pager."""

    def gradient_home(self, host: NDArray[np.float32]) -> Tensor | None:
        """Gradients accumulate where they will be read."""
        return torch.from_numpy(host)

    def used_bytes(self) -> int:
        """No memory beside the host's."""
        return 0

    def close(self) -> None:
        """Nothing to give back."""


_Format = tuple[int, torch.dtype]  # elements, and what they are


class SlotDevice:
    """A device with its own memory: packs are copied into slots, gradients copied out.

    Slots are kept and reused by size and dtype. ``SlotDevice(torch.device("cpu"))`` is the twin that runs the
    same code, separate copies included, where there is no accelerator.
    """

    in_place = False

    def __init__(
        self, torch_device: torch.device, *, max_bytes: int | None = None
    ) -> None:
        self.torch_device = torch_device
        self._max_bytes = max_bytes
        self._free: dict[_Format, list[Tensor]] = {}
        self._used_bytes = 0
        self.peak_bytes = 0

    def onload(self, host: Values) -> Tensor:
        """Copy a pack into a slot.

        Raises
        ------
        BudgetError
            The slots would exceed ``max_vram_gb``.
        """
        values = tensor_over(host)
        wanted = (values.numel(), values.dtype)
        free = self._free.get(wanted)
        slot = free.pop() if free else self._new_slot(*wanted)
        # A blocking copy: the host memory may be reused as soon as this returns.
        slot.copy_(values)
        return slot

    def _new_slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        while (
            self._max_bytes is not None and self._used_bytes + nbytes > self._max_bytes
        ):
            unused = next((slots for slots in self._free.values() if slots), None)
            if unused is None:
                msg = (
                    f"max_vram_gb={self._max_bytes / 1e9:.3g}: {self._used_bytes / 1e9:.3g} GB of slots are in "
                    f"use and a block of {nbytes / 1e9:.3g} GB is next; raise max_vram_gb"
                )
                raise BudgetError(msg)
            self._used_bytes -= unused.pop().nbytes
        slot = torch.empty(numel, dtype=dtype, device=self.torch_device)
        self._used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        return slot

    def release(self, flat: Tensor) -> None:
        """Put the slot back for the next pack of its size."""
        self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)

    def gradient_home(self, host: NDArray[np.float32]) -> Tensor | None:
        """Gradients accumulate on the device and leave once per window."""
        return None

    def used_bytes(self) -> int:
        """Bytes of all slots, in use or free."""
        return self._used_bytes

    def close(self) -> None:
        """Drop the slots."""
        self._free.clear()
        self._used_bytes = 0


def open_device(
    name: str | torch.device | None, *, max_vram_bytes: int | None
) -> Device:
    """Return the device to compute on; None takes CUDA where there is one, else the CPU.

    Raises
    ------
    ArgumentError
        The device is not there, or is of a kind that is not supported.
    """
    try:
        chosen = (
            torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if name is None
            else torch.device(name)
        )
    except (RuntimeError, TypeError):
        msg = f"device={name!r} is not a device; give 'cpu' or 'cuda', or leave it out"
        raise ArgumentError(msg) from None
    if chosen.type == "cpu":
        return HostDevice()
    if chosen.type != "cuda":
        msg = f"device={str(chosen)!r} is not supported; give 'cpu' or 'cuda', or leave it out"
        raise ArgumentError(msg)
    if not torch.cuda.is_available():
        msg = f"device={str(chosen)!r}, but torch sees no CUDA device here; give 'cpu' or leave it out"
        raise ArgumentError(msg)
    return SlotDevice(chosen, max_bytes=max_vram_bytes)
