"""Bytes on a device with memory of its own: what must be there, and what stays there to save copies and computing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from megatrain_nb.plan.model import ModelSpec, PackSpec

# Of each size: one slot computes while the other is filled.
SLOTS = 2

# Torch's allocator keeps pieces that fit nothing.
_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What stays on the device.

    Attributes
    ----------
    stay
        Pack indices whose weights stay until they change.
    keep_bytes
        Bytes that activations may take which are kept from forward to backward.
    tail
        Pack indices, all of them among ``stay``, whose gradients and states live there as well.
    """

    stay: frozenset[int] = field(default_factory=frozenset)
    keep_bytes: int = 0
    tail: frozenset[int] = field(default_factory=frozenset)


def slot_bytes(spec: ModelSpec) -> int:
    """Return the device memory, in bytes, that streaming takes.

    Slots of every size that packs have: a block computes beside the next one's weights, and its gradients
    leave while the next one's add up.
    """
    sizes = Counter(
        (pack.weight_bytes + pack.grad_bytes, pack.split) for pack in spec.packs
    )
    return sum(min(SLOTS, count) * size for (size, _), count in sizes.items())


def tail_bytes(spec: ModelSpec, packs: Iterable[int]) -> int:
    """Return the device memory, in bytes, of what some packs have beside their weights."""
    found = (spec.packs[pack] for pack in packs)
    return sum(pack.grad_bytes + pack.states_bytes for pack in found)


def plan_device(
    spec: ModelSpec,
    order: Sequence[int],
    *,
    limit_bytes: int,
    other_bytes: int,
    wanted_keep_bytes: int,
    keep_first: bool,
    tail_first: bool = False,
    max_tail_bytes: int | None = 0,
) -> DevicePlan:
    """Fill the device's budget by value.

    Parameters
    ----------
    spec
        The model.
    order
        Block indices in the order of the forward. Weights stay from the end on: backward needs them first. Those of
        the last block come last: it turns into its backward while it is loaded.
    limit_bytes
        What the device has.
    other_bytes
        The most that the model's own tensors take, without what is kept.
    wanted_keep_bytes
        What activations would take if every block kept them.
    keep_first
        Activations that are kept save computing, weights that stay save copies: which of them binds the step.
    tail_first
        The disk or the update on the host binds it: what lives on the device comes before both, see Notes.
    max_tail_bytes
        Gradients and moments may take this much; None for all there is room for.

    Notes
    -----
    By bytes saved per byte of the device's memory, a step, in fp32: a weight that stays saves one copy of its own 4
    bytes, 1.0. Gradient and moments of it take 12 bytes more, and save the copy of the gradient to RAM and that of the
    new weight back, 8 of 12: 0.7, so they come after it. But the disk they save 24 bytes of gradient and moments and up
    to 12 of weights, and the host the whole update: 3.0 and more of what binds then. Of a bf16 weight with an fp32
    master the same holds, with 2 bytes for 2, 1.0, and 6 for 14, 0.4.

    Examples
    --------
    >>> from megatrain_nb.plan.model import BlockSpec, ModelSpec, PackSpec
    >>> blocks = tuple(BlockSpec(index=i, name=str(i), packs=(i,)) for i in range(4))
    >>> packs = tuple(
    ...     PackSpec(index=i, name=str(i), params=(), numel=250) for i in range(4)
    ... )
    >>> spec = ModelSpec(blocks=blocks, packs=packs)
    >>> plan = plan_device(
    ...     spec,
    ...     [0, 1, 2, 3],
    ...     limit_bytes=10_000,
    ...     other_bytes=3_000,
    ...     wanted_keep_bytes=0,
    ...     keep_first=True,
    ... )
    >>> sorted(plan.stay)
    [1, 2]
    """
    room = int(_SHARE * (limit_bytes - other_bytes)) - slot_bytes(spec)
    room = max(0, room)
    stay: set[int] = set()
    tail: set[int] = set()

    def fill_tail(room: int) -> int:
        allowed = room if max_tail_bytes is None else max_tail_bytes
        for pack in _packs(spec, reversed(order)):
            num_bytes = tail_bytes(spec, [pack.index])
            weights = 0 if pack.index in stay else pack.weight_bytes
            fits = num_bytes + weights <= room and num_bytes <= allowed
            if fits and not pack.encoded:
                tail.add(pack.index)
                stay.add(pack.index)
                room -= num_bytes + weights
                allowed -= num_bytes
        return room

    if tail_first:
        room = fill_tail(room)
    keep_bytes = min(wanted_keep_bytes, room) if keep_first else 0
    room -= keep_bytes
    for pack in _packs(spec, [*reversed(order[:-1]), *order[-1:]]):
        if pack.index not in stay and pack.weight_bytes <= room:
            stay.add(pack.index)
            room -= pack.weight_bytes
    if not keep_first:
        keep_bytes = min(wanted_keep_bytes, room)
        room -= keep_bytes
    if not tail_first:
        fill_tail(room)
    return DevicePlan(frozenset(stay), keep_bytes, frozenset(tail))


def _packs(spec: ModelSpec, blocks: Iterable[int]) -> Iterable[PackSpec]:
    """Return the packs of some blocks in that order, each once."""
    return (spec.packs[pack] for pack in spec.pack_indices(blocks))
