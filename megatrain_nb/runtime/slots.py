"""A device with memory of its own: blocks compute on copies in slots, and gradients leave in one piece.

[Note: slots] A slot is device memory for one pack's weights, or for its gradients in fp32. Who gives it back need
not wait until it is out of use: ``busy`` is what must be over before its next use, and whoever takes it lets the
lane that writes into it first wait for that. With two slots of a size, one computes while the other is filled.
A slot belongs to this device until no lane has anything to do with it, so nothing that crosses lanes is freed
too early.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain_nb.errors import BudgetError
from megatrain_nb.plan.device import SLOTS
from megatrain_nb.plan.timeline import Span
from megatrain_nb.runtime.lanes import ThreadLanes, tensor_over
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from megatrain_nb.runtime.cuda import Vram
    from megatrain_nb.runtime.lanes import Lanes, Work
    from megatrain_nb.runtime.piece import Values

_Format = tuple[int, torch.dtype]  # elements, and what they are

# What a copy must at least be for its rate to count: below, the time to start it does.
_RATE_BYTES = 64 << 10
_STALL = "STALL"  # the compute lane waits for a copy


@dataclass(slots=True, eq=False)
class Slot:
    """Memory where a block computes.

    Attributes
    ----------
    flat
        One pack's weights or gradients, (numel,).
    busy
        What must be over before anybody else uses it; None in memory of the host's.
    leaving
        ``busy`` is a copy out of it, and nothing computes in it any more.
    """

    flat: Tensor
    busy: Work | None = None
    leaving: bool = False


@dataclass(slots=True, eq=False)
class Link:
    """What one copy lane has done so far.

    Attributes
    ----------
    num_bytes, seconds
        Moved, and the time that it took.
    best
        The highest rate of a copy, in bytes per second; 0.0 while none was large enough to tell.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    best: float = 0.0

    def note(self, num_bytes: int, seconds: float) -> None:
        """Count one copy."""
        self.num_bytes += num_bytes
        self.seconds += seconds
        if num_bytes >= _RATE_BYTES and seconds > 0:
            self.best = max(self.best, num_bytes / seconds)


class SlotDevice:
    """Packs are copied into slots, and gradients copied out, while others compute.

    Parameters
    ----------
    torch_device
        Where. ``torch.device("cpu")`` makes the twin: the same code with copies of its own, without an accelerator.
    max_bytes
        What the slots may take together; None for no limit.
    poison
        Fill slots with NaN once their last use is over, so that whoever forgets to wait shows. For tests.
    lanes
        Who copies; None for `ThreadLanes`.
    vram
        The device's own memory, where torch counts it.

    Attributes
    ----------
    compute_seconds
        Time of the compute lane inside `since` so far, as far as it is known.
    stall_seconds
        Time that it has waited for copies so far, as far as it is known.
    onloaded, offloaded
        What the copy lanes did so far.
    exhausted
        The device ran out of memory once: nothing should stay there that need not.
    """

    in_place = False

    def __init__(
        self,
        torch_device: torch.device,
        *,
        max_bytes: int | None = None,
        poison: bool = False,
        lanes: Lanes | None = None,
        vram: Vram | None = None,
    ) -> None:
        self.torch_device = torch_device
        self.lanes: Lanes = lanes if lanes is not None else ThreadLanes(late=poison)
        self.compute_seconds = self.stall_seconds = 0.0
        self.onloaded, self.offloaded = Link(), Link()
        self.exhausted = False
        self._max_bytes = max_bytes
        self._poison = poison
        self._vram = vram
        self._free: dict[_Format, deque[Slot]] = {}
        self._used_bytes = self._peak_bytes = 0
        self._works: list[tuple[str, str, int, Work]] = []

    # -- weights ----------------------------------------------------------------------------------------

    def onload(self, host: Values, *, name: str = "") -> Slot:
        """Begin to copy a pack into a slot; the host memory must not change until ``busy`` is over.

        Raises
        ------
        BudgetError
            The slots would exceed ``max_vram_gb``.
        """
        values = tensor_over(host)
        slot = self._take(values.numel(), values.dtype)
        self.fill(slot, host, name=name)
        return slot

    def ready(self, slot: Slot) -> Tensor:
        """Return a slot's values; what computes from now on waits until they are there."""
        assert slot.busy is not None
        begin = self.lanes.begin()
        self.lanes.compute_waits(slot.busy)
        self.since(begin, _STALL)
        return slot.flat

    def release(self, slot: Slot) -> None:
        """Give a slot back; what computes in it at this moment may go on."""
        assert slot.busy is not None
        if not slot.busy.done():  # a copy that nobody waited for
            self.lanes.compute_waits(slot.busy)
        slot.busy = (
            self.lanes.poison(slot.flat, None)
            if self._poison
            else self.lanes.computed()
        )
        slot.leaving = False
        self._give(slot)

    # -- gradients --------------------------------------------------------------------------------------

    def open_gradient(self, host: Values, *, pending: bool, name: str = "") -> Slot:
        """Return memory where a pack's gradients add up, float32.

        Parameters
        ----------
        host
            Where they will go.
        pending
            Begin with what is there.
        name
            Of the pack.
        """
        slot = self.hold(len(host))
        if pending:
            self.fill(slot, host, name=name)
        assert slot.busy is not None
        self.lanes.compute_waits(slot.busy)
        return slot

    def save_gradient(self, slot: Slot, host: Values, *, name: str = "") -> Work:
        """Begin to copy a slot out; ``host`` belongs to this device until that is over."""
        # .data: a count of changes of its own, since a block may be computing with these weights.
        slot.busy = self.lanes.copy_out(
            host, slot.flat, self.lanes.computed(slot.flat.data)
        )
        slot.leaving = True
        self._note("OFFLOAD", name, host.nbytes, slot.busy)
        return slot.busy

    def close_gradient(self, slot: Slot) -> None:
        """Give gradient memory back; a copy out of it may be on its way."""
        if self._poison:
            slot.busy = self.lanes.poison(slot.flat, slot.busy)
        elif not slot.leaving:
            slot.busy = self.lanes.computed()
        slot.leaving = False
        self._give(slot)

    # -- what lives there -------------------------------------------------------------------------------

    def hold(self, numel: int, dtype: torch.dtype = torch.float32) -> Slot:
        """Return memory for what only the update uses, or for gradients; `close_gradient` gives it back.

        Raises
        ------
        BudgetError
            The slots would exceed ``max_vram_gb``.
        """
        return self._take(numel, dtype)

    def fill(self, slot: Slot, host: Values, *, name: str = "") -> Work:
        """Begin to copy a piece into a slot; the host memory must not change until that is over."""
        slot.busy = self.lanes.copy_in(slot.flat, host, slot.busy)
        self._note("ONLOAD", name, host.nbytes, slot.busy)
        return slot.busy

    def wrote(self, slot: Slot) -> None:
        """Note that what computed until now wrote into a slot: `ready` waits for that."""
        slot.busy = self.lanes.computed(slot.flat.data)
        slot.leaving = False

    # -- what happened --------------------------------------------------------------------------------------

    def begin(self) -> Work:
        """Return the moment at which the compute lane gets here."""
        return self.lanes.begin()

    def since(self, begin: Work, kind: str = "", name: str = "") -> None:
        """Note the compute lane's work since a moment: as computing, or as a span of some kind."""
        self._works.append((kind, name, 0, self.lanes.since(begin)))

    def collect(self) -> list[Span]:
        """Return what has ended since the last call; never waits."""
        spans, going_on = [], []
        for kind, name, num_bytes, work in self._works:
            if not work.done():
                going_on.append((kind, name, num_bytes, work))
                continue
            work.wait()  # raises what it raised
            begin_s, end_s = work.times()
            seconds = max(0.0, end_s - begin_s)
            if not kind:
                self.compute_seconds += seconds
                continue
            if kind == _STALL:
                self.stall_seconds += seconds
                continue
            lane = "link" if num_bytes else "compute"
            if num_bytes:
                link = self.onloaded if kind == "ONLOAD" else self.offloaded
                link.note(num_bytes, seconds)
            spans.append(
                Span(
                    kind=kind,
                    name=name,
                    start_s=begin_s,
                    end_s=begin_s + seconds,
                    num_bytes=num_bytes,
                    lane=lane,
                )
            )
        self._works = going_on
        return spans

    def end_step(self) -> None:
        """Note that all computing of a step is over."""
        self.lanes.end_step()

    def _note(self, kind: str, name: str, num_bytes: int, work: Work) -> None:
        self._works.append((kind, name, num_bytes, work))

    # -- memory -------------------------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int | None:
        """What the device has for everything, in bytes; None for no limit."""
        return self._max_bytes if self._vram is None else self._vram.limit_bytes

    def used_bytes(self) -> int:
        """Return the bytes in use: all that torch has on the device, or all slots where it does not count."""
        return self._used_bytes if self._vram is None else self._vram.allocated_bytes()

    @property
    def peak_bytes(self) -> int:
        """The most that was in use, in bytes."""
        return self._peak_bytes if self._vram is None else self._vram.peak_bytes()

    def other_peak_bytes(self) -> int:
        """Return the most that torch's other tensors took on the device since the last call, in bytes."""
        return (
            0
            if self._vram is None
            else max(0, self._vram.restart_peak() - self._used_bytes)
        )

    def left_bytes(self) -> int:
        """Return what is not in use, in bytes."""
        used = self._used_bytes if self._vram is None else self._vram.allocated_bytes()
        return max(0, (self.limit_bytes or 0) - used)

    def has_room(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether a slot can be had without taking one from anybody."""
        if self._free.get((numel, dtype)) or self._max_bytes is None:
            return True
        free = sum(slot.flat.nbytes for slots in self._free.values() for slot in slots)
        wanted = numel * dtype.itemsize
        return self._used_bytes - free + wanted <= self._max_bytes

    def trim(self) -> None:
        """Let free slots go."""
        while self._drop_free():
            pass
        if self._vram is not None:
            self._vram.trim()

    def close(self) -> None:
        """Drop the slots."""
        self.lanes.close()
        self._works.clear()
        self._free.clear()
        self._used_bytes = 0
        if self._vram is not None:
            self._vram.close()

    def _take(self, numel: int, dtype: torch.dtype) -> Slot:
        """Return a free slot: one that is out of use, or a new one, or the one that will be soonest."""
        nbytes = numel * dtype.itemsize
        free = self._free.setdefault((numel, dtype), deque())
        idle = next(
            (slot for slot in free if slot.busy is None or slot.busy.done()), None
        )
        if idle is not None:
            free.remove(idle)
            return idle
        if free and (len(free) >= SLOTS or not self._fits(nbytes)):
            return free.popleft()
        while not self._fits(nbytes) and self._drop_free():
            pass
        if not self._fits(nbytes):
            raise BudgetError(self._too_little(nbytes))
        return self._new(numel, dtype)

    def _new(self, numel: int, dtype: torch.dtype) -> Slot:
        def make() -> Tensor:
            with torch.inference_mode(False):
                return torch.empty(numel, dtype=dtype, device=self.torch_device)

        nbytes = numel * dtype.itemsize
        flat = None
        try:
            flat = make()
        except torch.OutOfMemoryError:
            self.trim()
        if flat is None:
            try:
                flat = make()
            except torch.OutOfMemoryError:
                self.exhausted = True
        if flat is None:
            raise BudgetError(self._too_little(nbytes))
        self._used_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        # What computed in this memory before may not be over.
        busy = self.lanes.poison(flat, None) if self._poison else self.lanes.computed()
        return Slot(flat, busy)

    def _fits(self, nbytes: int) -> bool:
        return self._max_bytes is None or self._used_bytes + nbytes <= self._max_bytes

    def _give(self, slot: Slot) -> None:
        wanted = (slot.flat.numel(), slot.flat.dtype)
        self._free.setdefault(wanted, deque()).append(slot)

    def _drop_free(self) -> bool:
        """Let one free slot go; False if there is none."""
        unused = next((slots for slots in self._free.values() if slots), None)
        if unused is None:
            return False
        slot = unused.popleft()
        if slot.busy is not None:  # whatever gets this memory next is computed after it
            self.lanes.compute_waits(slot.busy)
        self._used_bytes -= slot.flat.nbytes
        return True

    def _too_little(self, nbytes: int) -> str:
        limit = self.limit_bytes
        have = (
            f"{format_bytes(self._used_bytes)} of slots are in use"
            if self._vram is None
            else f"torch has {format_bytes(self._vram.allocated_bytes())} in use"
        )
        name = f"max_vram_gb={limit / 1e9:.3g}: " if limit is not None else ""
        return (
            f"{name}{have} on {self.torch_device} and a block needs {format_bytes(nbytes)} more; raise max_vram_gb, or "
            "shorten the sequence or the micro-batch"
        )
