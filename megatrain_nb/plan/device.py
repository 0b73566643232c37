"""Bytes on a device with memory of its own: what must be there, and what stays there to save copies and computing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain_nb.plan.model import ModelSpec

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
    """

    stay: frozenset[int] = field(default_factory=frozenset)
    keep_bytes: int = 0


def slot_bytes(spec: ModelSpec) -> int:
    """Return the device memory, in bytes, that streaming takes.

    Slots of every size that packs have: a block computes beside the next one's weights, and its gradients
    leave while the next one's add up.
    """
    sizes = Counter(
        (pack.weight_bytes + pack.grad_bytes, pack.split) for pack in spec.packs
    )
    return sum(min(SLOTS, count) * size for (size, _), count in sizes.items())


def plan_device(
    spec: ModelSpec,
    order: Sequence[int],
    *,
    limit_bytes: int,
    other_bytes: int,
    wanted_keep_bytes: int,
    keep_first: bool,
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
    keep_bytes = min(wanted_keep_bytes, room) if keep_first else 0
    room -= keep_bytes
    stay: set[int] = set()
    for block in dict.fromkeys([*reversed(order[:-1]), *order[-1:]]):
        for pack in spec.packs_of(block):
            if pack.index not in stay and pack.weight_bytes <= room:
                stay.add(pack.index)
                room -= pack.weight_bytes
    if not keep_first:
        keep_bytes = min(wanted_keep_bytes, room)
    return DevicePlan(frozenset(stay), keep_bytes)
