"""Packs of which everything lives on the device: weights, gradients and moments. AdamW runs there.

[Note: the tail] Where a device has room beside what streams, the plan gives whole packs to it, from the model's end
on. A pack *joins* when its block is about to compute gradients: its weights are there already, its moments are
copied. From then on its gradients add up there, `optimizer.step` updates it at once, and nothing of it crosses the
link or the disk. What RAM and disk have of it grows old; those pieces are marked, and the pager refuses to use
them. Who looks at a weight, a moment or a gradient asks the tail to `show` it first: what is old is copied, and the
pack goes on living there. Who writes lets it `leave`: then RAM and disk have it as before, until it joins again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatrain_nb.errors import BudgetError, ModelError
from megatrain_nb.optim.adamw import cut
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.piece import MOMENTS, What
from megatrain_nb.runtime.slots import SlotDevice

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from megatrain_nb.optim.adamw import Segment
    from megatrain_nb.runtime.executor import Executor
    from megatrain_nb.runtime.piece import Piece
    from megatrain_nb.runtime.slots import Slot

# Elements that are clipped at once: a multiple of 8 (see `Segment`), 64 MiB beside what lives on the device.
CHUNK = 16 << 20

_KINDS = (What.WEIGHTS, What.GRADS, *MOMENTS)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What of a pack is in slots beside its weights, which are where those of every loaded pack are."""

    grads: Slot
    exp_avg: Slot
    exp_avg_sq: Slot


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
        self._held: dict[int, _Held] = {}

    def __contains__(self, pack: object) -> bool:
        return pack in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._held))

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients and moments there."""
        return sum(
            slot.flat.nbytes
            for held in self._held.values()
            for slot in (held.grads, held.exp_avg, held.exp_avg_sq)
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
                found[pack] = self._held[pack].grads
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
            held, name = self._held[pack], pager.packs[pack].name
            written = (self._executor.slot(pack), held.exp_avg, held.exp_avg_sq)
            param, *moments = (device.ready(slot) for slot in written)
            grad = device.ready(held.grads)
            moment = device.begin()
            try:
                adamw_on_device(param, moments, grad, parts, grad_scale=grad_scale)
            except BaseException as error:
                pager.broken = (
                    f"the update of {name} failed half-way ({type(error).__name__}: {error}), so the model must not be "
                    "used any more; close the session and start again"
                )
                raise
            device.since(moment)
            device.since(moment, "STEP", f"{name}.0")
            for slot in written:
                device.wrote(slot)
            for what in (What.WEIGHTS, *MOMENTS):
                piece = self._piece(pack, what)
                piece.old, piece.dirty = True, False

    def took(self, pack: int) -> None:
        """Note that a block's gradients were added up."""
        self._device.wrote(self._held[pack].grads)

    def forget_gradients(self) -> None:
        """Let all gradients there be zero."""
        for held in self._held.values():
            self._device.ready(held.grads).zero_()
            self._device.wrote(held.grads)

    def show(self, pack: int, *kinds: What) -> None:
        """Let RAM and disk have the last version of a pack that lives there; without ``kinds`` of all of it.

        Raises
        ------
        BudgetError
            RAM has no room; nothing is lost.
        """
        if pack not in self:
            return
        held = self._held[pack]
        slots = {
            What.WEIGHTS: self._executor.slot(pack),
            What.EXP_AVG: held.exp_avg,
            What.EXP_AVG_SQ: held.exp_avg_sq,
        }
        if self._is_pending(pack):
            slots[What.GRADS] = held.grads
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
            for what in _KINDS:
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

    def _piece(self, pack: int, what: What) -> Piece:
        return self._executor.pager.piece(pack, what)

    def _is_pending(self, pack: int) -> bool:
        homes = self._executor.layers.homes
        return any(homes[p].pack.index == pack for p in self._executor.norms)

    def _join(self, pack: int) -> None:
        """Bring the moments of a loaded pack; where there is no room after all, things are as before."""
        device, pager = self._device, self._executor.pager
        spec = pager.packs[pack]
        if spec.split or spec.encoded:
            return
        self._executor.updates.settle(pack)
        slots: list[Slot] = []
        try:
            while len(slots) < 1 + len(MOMENTS):
                slots.append(device.hold(spec.numel))
            for what, slot in zip(MOMENTS, slots[1:], strict=True):
                host = pager.need(pack, what, foreseen=False)
                try:
                    pager.lend(pack, what, device.fill(slot, host, name=spec.name))
                finally:
                    pager.drop(pack, what)
        except BaseException as error:
            for slot in slots:
                self._give(slot)
            if isinstance(error, BudgetError):
                return
            raise
        self._held[pack] = _Held(*slots)
        for what in _KINDS:
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
        held = self._held.pop(pack)
        for slot in (held.grads, held.exp_avg, held.exp_avg_sq):
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
) -> None:
    """Apply AdamW or Adam to every segment, in place, with torch's fused kernels.

    On a CPU the bits are those of `megatrain_nb.optim.kernels`, which follow these kernels. On a GPU each operation is
    rounded to float32 as well, but products and sums are contracted otherwise: an update differs by some ulp.

    Parameters
    ----------
    param : float32, shape (N,)
        Overwritten.
    moments : float32, shape (N,), two
        Overwritten.
    grad : float32, shape (N,)
        Only read.
    segments
        The parameters.
    grad_scale
        Factor on every gradient: the clip coefficient, 1.0 for none.
    """
    exp_avg, exp_avg_sq = moments
    largest = max((segment.stop - segment.start for segment in segments), default=0)
    scratch = grad.new_empty(min(largest, CHUNK) if grad_scale != 1.0 else 0)
    for segment in segments:
        config = segment.config
        formula = adamw if config.decoupled else adam
        for part in cut(segment.start, segment.stop, CHUNK):
            scaled = grad[part]
            if grad_scale != 1.0:
                out = scratch[: part.stop - part.start]
                scaled = torch.mul(scaled, grad_scale, out=out)
            before = grad.new_full((), segment.step - 1)
            formula(
                [param[part]],
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
