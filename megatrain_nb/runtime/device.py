"""Where blocks compute: in place on host memory, or on copies in slots of another memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatrain_nb.errors import ArgumentError
from megatrain_nb.runtime.cuda import CudaLanes, PinnedPages, Vram
from megatrain_nb.runtime.lanes import BlockingLanes, tensor_over
from megatrain_nb.runtime.slots import Link, Slot, SlotDevice

if TYPE_CHECKING:
    from megatrain_nb.plan.timeline import Span
    from megatrain_nb.runtime.lanes import Work
    from megatrain_nb.runtime.piece import Values


class Device(Protocol):
    """The whole difference between a CPU and an accelerator, for the runtime.

    Attributes
    ----------
    in_place
        Blocks compute on the host's memory.
    compute_seconds
        Time that the device has computed so far; 0.0 where the host knows it, being the one that computes.
    stall_seconds
        Time that it has waited for copies so far.
    onloaded, offloaded
        What was copied to the device and from it so far.
    exhausted
        The device ran out of memory once.
    """

    torch_device: torch.device
    in_place: bool
    compute_seconds: float
    stall_seconds: float
    onloaded: Link
    offloaded: Link
    exhausted: bool

    @property
    def limit_bytes(self) -> int | None:
        """What the device has for everything, in bytes; None for no limit, or where its memory is the host's."""

    def onload(self, host: Values, *, name: str = "") -> Slot:
        """Begin to bring a pack's weights to where its block computes, float32 or bfloat16."""

    def ready(self, slot: Slot) -> Tensor:
        """Return the weights, flat (numel,); what computes from now on finds them there."""

    def release(self, slot: Slot) -> None:
        """End the use of what ``onload`` returned; the memory may be reused."""

    def open_gradient(self, host: Values, *, pending: bool, name: str = "") -> Slot:
        """Return where a pack's gradients add up, float32 (numel,); with ``pending``, to what is in ``host``."""

    def save_gradient(self, slot: Slot, host: Values, *, name: str = "") -> Work | None:
        """Begin to bring gradients to ``host``; None where they are there."""

    def close_gradient(self, slot: Slot) -> None:
        """End the use of what ``open_gradient`` returned."""

    def begin(self) -> Any:
        """Return the moment at which the device gets here."""

    def since(self, begin: Any, kind: str = "", name: str = "") -> None:
        """Note what the device did since a moment: as computing, or as a span of some kind."""

    def collect(self) -> list[Span]:
        """Return what has ended on the device since the last call; never waits."""

    def end_step(self) -> None:
        """Note that all computing of a step is over."""

    def used_bytes(self) -> int:
        """Device memory in use, in bytes; 0 where it is the host's."""

    @property
    def peak_bytes(self) -> int:
        """The most that was in use, in bytes."""

    def other_peak_bytes(self) -> int:
        """Return the most that other tensors took on the device since the last call, in bytes."""

    def left_bytes(self) -> int:
        """Return the device memory that is not in use, in bytes."""

    def has_room(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether there is memory for one more pack."""

    def trim(self) -> None:
        """Give memory back that nobody uses."""

    def close(self) -> None:
        """Give everything back."""


class HostDevice:
    """The CPU: a block computes on the very bytes that were read, without a second copy."""

    in_place = True
    peak_bytes = 0
    compute_seconds = 0.0
    stall_seconds = 0.0
    limit_bytes: int | None = None
    exhausted = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.onloaded, self.offloaded = Link(), Link()

    def onload(self, host: Values, *, name: str = "") -> Slot:
        """Return a view of the host memory."""
        return Slot(tensor_over(host))

    def ready(self, slot: Slot) -> Tensor:
        """Return the view: it was never elsewhere."""
        return slot.flat

    def release(self, slot: Slot) -> None:
        """Nothing to give back: the slab belongs to the pager."""

    def open_gradient(self, host: Values, *, pending: bool, name: str = "") -> Slot:
        """Gradients accumulate where they will be read."""
        return Slot(torch.from_numpy(host))

    def save_gradient(self, slot: Slot, host: Values, *, name: str = "") -> None:
        """Nothing to copy."""

    def close_gradient(self, slot: Slot) -> None:
        """Nothing to give back."""

    def begin(self) -> None:
        """Nothing to note: the host knows when it computes."""

    def since(self, begin: None, kind: str = "", name: str = "") -> None:
        """Nothing to note: the host knows when it computes."""

    def collect(self) -> list[Span]:
        """Nothing happens elsewhere."""
        return []

    def end_step(self) -> None:
        """Nothing to note."""

    def used_bytes(self) -> int:
        """No memory beside the host's."""
        return 0

    def other_peak_bytes(self) -> int:
        """No memory beside the host's."""
        return 0

    def left_bytes(self) -> int:
        """No memory beside the host's."""
        return 0

    def has_room(self, numel: int, dtype: torch.dtype) -> bool:
        """Say yes: views take no memory."""
        return True

    def trim(self) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Nothing to give back."""


def open_device(
    name: str | torch.device | None, *, max_vram_bytes: int | None
) -> Device:
    """Return the device to compute on; None takes CUDA where there is one, else the CPU.

    Raises
    ------
    ArgumentError
        The device is not there, or is of a kind that is not supported.
    BudgetError
        More than ``max_vram_gb`` is in use there already.
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
    if chosen.type == "mps" and torch.backends.mps.is_available():
        return SlotDevice(
            torch.device("mps", 0), max_bytes=max_vram_bytes, lanes=BlockingLanes()
        )
    if chosen.type != "cuda":
        msg = f"device={str(chosen)!r} is not supported here; give 'cpu' or 'cuda', or leave it out"
        raise ArgumentError(msg)
    if not torch.cuda.is_available():
        msg = f"device={str(chosen)!r}, but torch sees no CUDA device here; give 'cpu' or leave it out"
        raise ArgumentError(msg)
    return _open_cuda(chosen, max_vram_bytes)


def _open_cuda(chosen: torch.device, max_vram_bytes: int | None) -> SlotDevice:
    index: int | None = chosen.index
    if index is None:  # tensors name theirs, and are compared with this one
        index = torch.cuda.current_device()
        chosen = torch.device("cuda", index)
    if index >= torch.cuda.device_count():
        msg = f"device={str(chosen)!r}: torch sees {torch.cuda.device_count()} CUDA devices, counted from 0"
        raise ArgumentError(msg)
    # What the libraries take, on both sides, is not the model's.
    square = torch.ones((16, 16), device=chosen)
    (square @ square).sum().item()
    vram = Vram(chosen, max_vram_bytes)
    return SlotDevice(
        chosen,
        max_bytes=max_vram_bytes,
        lanes=CudaLanes(chosen),
        vram=vram,
    )


def pinned_pages(device: Device) -> PinnedPages | None:
    """Return what page-locks host memory for a device; None where nothing is gained."""
    if device.torch_device.type != "cuda":
        return None
    return PinnedPages(device.torch_device)
