"""A block's gradients: where they add up while it computes, and how they come to the bytes that the update reads.

Then those of all blocks: their norm, and whether each is where the update will read it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatrain_nb.errors import StoreError
from megatrain_nb.optim.gradient import accumulate
from megatrain_nb.plan.timeline import Span
from megatrain_nb.runtime.chunks import HOME
from megatrain_nb.runtime.layers import part_of
from megatrain_nb.runtime.piece import What

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain_nb.runtime.bound import Bound
    from megatrain_nb.runtime.executor import Executor
    from megatrain_nb.runtime.layers import Block
    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.runtime.pager import Pager
    from megatrain_nb.runtime.slots import Slot

Slots = dict[int, "Slot"]


class Gradients:
    """The gradients of the block that computes.

    They add up in fp32 over a window, on a CPU in the very bytes that the optimizer will read, on another device in
    memory of its own, from where they leave in one piece when the block is done.
    """

    def __init__(self, executor: Executor, on_span: Callable[[Span], None]) -> None:
        self._executor = executor
        self._on_span = on_span

    def open(self, block: Block) -> Slots:
        """Return memory for the gradients of each pack in which a parameter of a block wants one."""
        executor = self._executor
        homes, pager = executor.layers.homes, executor.pager
        params = (site.param for site in block.sites if site.param.requires_grad)
        packs = dict.fromkeys(homes[param].pack.index for param in params)
        # A parameter without a norm has no gradient: nobody looks at the bytes there.
        blank = packs.keys() - {homes[param].pack.index for param in executor.norms}
        found = pager.need_all(((pack, What.GRADS) for pack in packs), blank=blank)
        opened: Slots = {}
        try:
            for (pack, _), values in found.items():
                executor.make_device_room(len(values), torch.float32, block)
                opened[pack] = slot = executor.device.open_gradient(
                    values, pending=pack not in blank, name=pager.packs[pack].name
                )
                if pack not in blank and slot.busy is not None:
                    pager.lend(pack, What.GRADS, slot.busy)
        except BaseException:
            self.close(opened)
            for pack in packs.keys() - opened.keys():
                pager.drop(pack, What.GRADS)
            raise
        return opened

    def close(self, slots: Slots, *, keep: bool = False) -> None:
        """End the use of what `open` returned; with ``keep`` the next forward begins with it."""
        for pack, slot in slots.items():
            self._executor.device.close_gradient(slot)
            self._executor.pager.drop(pack, What.GRADS, dirty=True, keep=keep)

    def home(self, param: nn.Parameter, bound: Bound, slots: Slots) -> None:
        """Let a parameter's gradient accumulate where it belongs."""
        home, plain = self._executor.layers.homes[param], bound.plain[param]
        # .data: a count of changes of its own, or a change of one parameter's gradient would pass for one of another's.
        gradient = part_of(slots[home.pack.index].flat.data, home)
        if home.pack.split:
            self.sum(param, bound, gradient)
            return
        setattr(plain, HOME, gradient)
        if param in self._executor.norms:
            plain.grad = gradient

        def landed(tensor: Tensor) -> None:
            # The first gradient comes as a tensor of its own; from then on autograd adds in place.
            if (
                tensor.grad is not None
                and tensor.grad.data_ptr() != gradient.data_ptr()
            ):
                gradient.copy_(tensor.grad)
                tensor.grad = gradient

        bound.landed[param] = landed
        plain.register_post_accumulate_grad_hook(landed)

    def sum(self, param: nn.Parameter, bound: Bound, total: Tensor) -> None:
        """Let a split parameter's bf16 gradients add up in fp32, one micro-batch after the other."""
        if param in self._executor.norms:
            bound.sums[param] = total

        def landed(tensor: Tensor) -> None:
            grad, tensor.grad = tensor.grad, None
            if grad is None:
                return
            add(total, grad, first=param not in bound.sums)
            bound.sums[param] = total

        bound.landed[param] = landed
        bound.plain[param].register_post_accumulate_grad_hook(landed)

    def take(self, block: Block, bound: Bound, slots: Slots) -> None:
        """Note the gradients' norms, where they are, and let them leave for RAM."""
        start = time.perf_counter()
        num_bytes = 0
        executor, packs = self._executor, set()
        for param, plain in bound.plain.items():
            gradient = bound.sums.get(param, plain.grad)
            if gradient is None:
                continue
            home = executor.layers.homes[param]
            pending = part_of(slots[home.pack.index].flat, home)
            if gradient.data_ptr() != pending.data_ptr():
                pending.copy_(gradient)
            num_bytes += pending.nbytes
            executor.norms[param] = torch.linalg.vector_norm(pending)
            packs.add(home.pack.index)
        for pack in sorted(packs):
            piece = executor.pager.piece(pack, What.GRADS)
            host = piece.values()
            leaving = executor.device.save_gradient(
                slots[pack], host, name=piece.pack.name
            )
            if leaving is not None:
                executor.pager.lend(pack, What.GRADS, leaving)
        if executor.device.in_place:
            end = time.perf_counter()
            self._on_span(
                Span(
                    kind="OFFLOAD",
                    name=block.name,
                    start_s=start,
                    end_s=end,
                    num_bytes=num_bytes,
                )
            )


def add(total: Tensor, grad: Tensor, *, first: bool) -> None:
    """Add a gradient to a contiguous fp32 sum of its shape, or begin the sum with it."""
    if (
        grad.device.type == "cpu"
        and grad.dtype == torch.bfloat16
        and grad.is_contiguous()
    ):
        bits = grad.detach().view(torch.uint16).view(-1)
        accumulate(total.view(-1).numpy(), bits.numpy(), first=first)
    elif first:
        total.copy_(grad)
    else:
        total.add_(grad)


def total_norm(offloaded: OffloadedModel) -> Tensor:
    """Return the 2-norm of all pending gradients, a float32 scalar, as torch's clip_grad_norm_ computes it."""
    norms = offloaded.executor.norms
    found = []
    for param in offloaded.model.parameters():
        if param in norms:
            found.append(norms[param])
        elif param not in offloaded.layers.homes and param.grad is not None:
            found.append(torch.linalg.vector_norm(param.grad))
    if not found:
        return torch.tensor(0.0)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(_on_host(found)))
    return norm


def _on_host(scalars: list[Tensor]) -> list[Tensor]:
    """Bring scalars to the CPU, those of one device together: the host waits once."""
    found = list(scalars)
    for device in {x.device for x in scalars if x.device.type != "cpu"}:
        places = [index for index, x in enumerate(scalars) if x.device == device]
        values = torch.stack([scalars[index] for index in places]).cpu()
        for index, value in zip(places, values.unbind(), strict=True):
            found[index] = value
    return found


def check_stored(pager: Pager) -> None:
    """Raise if a pending gradient did not reach the disk.

    Raises
    ------
    StoreError
        Names it; no weight has changed.
    """
    with suppress(StoreError):
        pager.settle_writes(What.GRADS)
    if pager.lost:
        raise StoreError(next(iter(pager.lost.values())))
