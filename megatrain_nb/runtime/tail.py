"""Packs of which everything lives on the device: weights, gradients, moments, lower halves. AdamW runs there.

[Note: the tail] Where a device has room beside what streams, the plan gives whole packs to it, from the model's end
on. A pack *joins* when its block is about to compute gradients: its weights are there already, its moments are
copied. From then on its gradients add up there, `optimizer.step` updates it at once, and nothing of it crosses the
link or the disk. What RAM and disk have of it grows old; those pieces are marked, and the pager refuses to use
them. Who looks at a weight, a moment or a gradient asks the tail to `show` it first: what is old is copied, and the
pack goes on living there. Who writes lets it `leave`: then RAM and disk have it as before, until it joins again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatrain_nb.errors import BudgetError, ModelError
from megatrain_nb.optim.adamw import cut
from megatrain_nb.runtime.halves import join_halves, split_halves
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.piece import MOMENTS, What, states_of
from megatrain_nb.runtime.slots import SlotDevice

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from megatrain_nb.optim.adamw import Segment
    from megatrain_nb.runtime.executor import Executor
    from megatrain_nb.runtime.piece import Piece
    from megatrain_nb.runtime.slots import Slot

# Elements that are clipped at once: a multiple of 8 (see `Segment`), 64 MiB beside what lives on the device. Of a split
# pack a quarter, since its numbers are joined and split in several arrays.
CHUNK = 16 << 20


class Tail:
    """The packs of one model that live on a device with memory of its own.

    Attributes
    ----------
    planned
        Pack indices that may live there.
    """

    def __init__(self, executor: Executor) -> None:
        self.planned: frozenset[int] = frozenset()
        self._executor = executor
        # By kind; the weights are where those of every loaded pack are.
        self._held: dict[int, dict[What, Slot]] = {}

    def __contains__(self, pack: object) -> bool:
        return pack in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._held))

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes there, without weights."""
        return sum(
            slot.flat.nbytes for held in self._held.values() for slot in held.values()
        )

    def plan(self, packs: frozenset[int]) -> None:
        """Take over which packs may live there; others leave now."""
        self.planned = packs
        for pack in [pack for pack in self if pack not in packs]:
            self.leave(pack)

    def gradients(
        self, packs: Iterable[int], *, blank: Container[int]
    ) -> dict[int, Slot]:
        """Return where the gradients of those of some loaded packs add up that live there, or join now.

        ``blank`` are the packs without a pending gradient; others do not join.
        """
        found = {}
        for pack in packs:
            if pack in self.planned and pack in blank and pack not in self:
                self._join(pack)
            if pack in self:
                found[pack] = self._held[pack][What.GRADS]
                self._device.ready(found[pack])
                self._piece(pack, What.GRADS).old = True
        return found

    def update(
        self, segments: Mapping[int, Sequence[Segment]], *, grad_scale: float
    ) -> None:
        """Update packs that live there, on the compute lane.

        Parameters
        ----------
        segments
            By pack index: the parameters that have a gradient.
        grad_scale
            Clip coefficient.
        """
        pager = self._executor.pager
        for pack, parts in segments.items():
            device = self._device
            name, slots = pager.packs[pack].name, self._slots(pack)
            flats = {what: device.ready(slot) for what, slot in slots.items()}
            moment = device.begin()
            with pager.must_end(f"the update of {name}"):
                adamw_on_device(
                    flats[What.WEIGHTS],
                    [flats[what] for what in MOMENTS],
                    flats[What.GRADS],
                    parts,
                    grad_scale=grad_scale,
                    low=flats.get(What.LOW),
                )
            device.since(moment)
            device.since(moment, "STEP", f"{name}.0")
            del slots[What.GRADS]
            for what, slot in slots.items():
                device.wrote(slot)
                piece = self._piece(pack, what)
                piece.old, piece.dirty = True, False

    def took(self, pack: int) -> None:
        """Note that a block's gradients were added up."""
        self._device.wrote(self._held[pack][What.GRADS])

    def forget_gradients(self) -> None:
        """Let all gradients there be zero."""
        for held in self._held.values():
            self._device.ready(held[What.GRADS]).zero_()
            self._device.wrote(held[What.GRADS])

    def show(self, pack: int, *kinds: What) -> None:
        """Let RAM and disk have the last version of a pack that lives there; without ``kinds`` of all of it.

        Raises
        ------
        BudgetError
            RAM has no room; nothing is lost.
        """
        if pack not in self:
            return
        slots = self._slots(pack)
        if not self._is_pending(pack):
            del slots[What.GRADS]
        with interrupts_wait(self._executor.stop, breakable=False):
            for what, slot in slots.items():
                if self._piece(pack, what).old and (not kinds or what in kinds):
                    self._copy_out(pack, what, slot)

    def show_all(self) -> None:
        """Show every pack."""
        for pack in self:
            self.show(pack)

    def leave(self, pack: int) -> None:
        """Let a pack live in RAM and on disk again, bit for bit as it was on the device.

        Raises
        ------
        BudgetError
            RAM has no room; nothing is lost.
        ModelError
            Its block computes at this moment.
        """
        if pack not in self:
            return
        name = self._executor.pager.packs[pack].name
        if pack in self._executor.computing:
            msg = f"{name} cannot be changed while its block computes; do that between two steps"
            raise ModelError(msg)
        with interrupts_wait(self._executor.stop, breakable=False):
            self.show(pack)
            self._give_back(pack)
            self._executor.unload(pack)
            for what in self._kinds(pack):
                piece = self._piece(pack, what)
                piece.on_device = piece.old = False

    def leave_all(self) -> None:
        """Let every pack leave."""
        for pack in self:
            self.leave(pack)

    def drop(self) -> None:
        """Give the memory back, whatever is in it; nobody wants it any more."""
        for pack in self:
            self._give_back(pack)

    # -- inside ---------------------------------------------------------------------------------------

    @property
    def _device(self) -> SlotDevice:
        device = self._executor.device
        assert isinstance(device, SlotDevice)
        return device

    def _kinds(self, pack: int) -> tuple[What, ...]:
        return (What.WEIGHTS, What.GRADS, *states_of(self._executor.pager.packs[pack]))

    def _slots(self, pack: int) -> dict[What, Slot]:
        return {What.WEIGHTS: self._executor.slot(pack), **self._held[pack]}

    def _piece(self, pack: int, what: What) -> Piece:
        return self._executor.pager.piece(pack, what)

    def _is_pending(self, pack: int) -> bool:
        homes = self._executor.layers.homes
        return any(homes[p].pack.index == pack for p in self._executor.norms)

    def _join(self, pack: int) -> None:
        """Bring moments and lower halves of a loaded pack; where there is no room after all, things are as before."""
        device, pager = self._device, self._executor.pager
        spec = pager.packs[pack]
        if spec.encoded:
            return
        self._executor.updates.settle(pack)
        slots: dict[What, Slot] = {}
        try:
            for what in (What.GRADS, *states_of(spec)):
                half = what is What.LOW
                slots[what] = device.hold(
                    spec.numel, torch.bfloat16 if half else torch.float32
                )
            for what in states_of(spec):
                host = pager.need(pack, what, foreseen=False)
                try:
                    copying = device.fill(slots[what], host, name=spec.name)
                    pager.lend(pack, what, copying)
                finally:
                    pager.drop(pack, what)
        except BaseException as error:
            for slot in slots.values():
                self._give(slot)
            if isinstance(error, BudgetError):
                return
            raise
        self._held[pack] = slots
        for what in self._kinds(pack):
            self._piece(pack, what).on_device = True

    def _copy_out(self, pack: int, what: What, slot: Slot) -> None:
        device, pager = self._device, self._executor.pager
        piece = self._piece(pack, what)
        device.ready(slot)  # what comes into it is there before it leaves
        host = pager.need(pack, what, blank=True)
        try:
            leaving = device.save_gradient(slot, host, name=piece.pack.name)
            pager.lend(pack, what, leaving)
            piece.old, piece.dirty = False, True
        finally:
            pager.drop(pack, what)
        device.ready(slot)  # what computes from now on may write there

    def _give_back(self, pack: int) -> None:
        for slot in self._held.pop(pack).values():
            self._give(slot)

    def _give(self, slot: Slot) -> None:
        self._device.ready(slot)  # a copy that nobody waited for
        self._device.close_gradient(slot)


@torch.no_grad()
def adamw_on_device(
    param: Tensor,
    moments: Sequence[Tensor],
    grad: Tensor,
    segments: Sequence[Segment],
    *,
    grad_scale: float,
    low: Tensor | None = None,
) -> None:
    """Apply AdamW or Adam to every segment, in place, with torch's fused kernels.

    On a CPU the bits are those of `megatrain_nb.optim.kernels`, which follow these kernels. On a GPU each operation is
    rounded to float32 as well, but products and sums are contracted otherwise: an update differs by some ulp.

    Parameters
    ----------
    param : float32, shape (N,), or bfloat16 with ``low``
        Overwritten.
    moments : float32, shape (N,), two
        Overwritten.
    grad : float32, shape (N,)
        Only read.
    segments
        The parameters.
    grad_scale
        Factor on every gradient: the clip coefficient, 1.0 for none.
    low : bfloat16, shape (N,)
        The bits of the lower halves of numbers whose upper halves ``param`` holds; overwritten.
    """
    exp_avg, exp_avg_sq = moments
    chunk = CHUNK if low is None else max(8, CHUNK // 4)
    largest = max((segment.stop - segment.start for segment in segments), default=0)
    scratch = grad.new_empty(min(largest, chunk) if grad_scale != 1.0 else 0)
    for segment in segments:
        config = segment.config
        formula = adamw if config.decoupled else adam
        for part in cut(segment.start, segment.stop, chunk):
            master = param[part] if low is None else join_halves(param[part], low[part])
            scaled = grad[part]
            if grad_scale != 1.0:
                out = scratch[: part.stop - part.start]
                scaled = torch.mul(scaled, grad_scale, out=out)
            before = grad.new_full((), segment.step - 1)
            formula(
                [master],
                [scaled],
                [exp_avg[part]],
                [exp_avg_sq[part]],
                [],
                [before],
                fused=True,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=config.lr,
                weight_decay=config.weight_decay,
                eps=config.eps,
                maximize=config.maximize,
            )
            if low is not None:
                split_halves(master, param[part], low[part])
