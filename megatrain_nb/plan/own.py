"""What a run takes beside its packs, on a machine whose blocks compute in RAM: from the model's shape.

A session sets as much aside before its first step, and a forecast says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain_nb.plan.activation import (
    border_bytes,
    kept_bytes,
    largest_kept_bytes,
    logits_bytes,
)
from megatrain_nb.plan.logits import BYTES_PER_LOGIT
from megatrain_nb.plan.reserve import NEARLY_FULL, large_bytes, with_margin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain_nb.plan.activation import Window
    from megatrain_nb.plan.choices import Choices
    from megatrain_nb.plan.logits import Chunking
    from megatrain_nb.plan.shape import Shape

# What torch takes beside the tensors: buffers of the matrix library, threads, holes in the heap. Measured on small
# models (docs/forecast.md); less where it computes in bf16.
_TORCH_BYTES, _TORCH_BF16_BYTES = 80_000_000, 70_000_000

# Runs of the same model differ by so much, since freed memory waits in the heap; a session sets aside what it has seen, a
# plan names the most. It is less where the heap is given back at each border.
SPREAD_BYTES = 64_000_000
_LEAST_SPREAD_BYTES = 16_000_000

# Each logit tensor in the heap is freed among smaller ones, and the next does not fit into what those leave. Found in the
# heap at the turn: 118 MB free beside four of 16 MB.
_TORN = 2.0

# Freed memory between tensors that are kept waits in the heap: half of them, where they are small and few; of more
# and larger ones the system takes it back (`megatrain_nb.runtime.heap`). Measured, as above.
_HOLES_SHARE, _HOLES_BYTES = 0.55, 6.8e3

# So much of all kept activations leaves at least one block that keeps none.
_PARTLY = 0.9

# Tensors of 2 MiB and more lie in huge pages, and what is learned of their sum is a little old.
ROUNDING_BYTES = 16_000_000

# While a block is in backward: what it keeps, gradients of it, and what the operation in progress makes.
_BACKWARD_SHARE = 1.4

# Experts in one tensor, taken one after the other: the gradient of each slice is as large as all of it, and two are
# added to a third.
_STACKED = 3

ONE_BLOCK = "one block's activations"


@dataclass(frozen=True, slots=True)
class OwnTensors:
    """What the model's own tensors take while blocks stream.

    Attributes
    ----------
    items
        Bytes by what they are.
    chunking
        How logits are cut that would not fit; None where they fit.
    torn_bytes
        Free memory between logits in the heap.
    """

    items: Mapping[str, int]
    chunking: Chunking | None = None
    torn_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return sum(self.items.values())


def own_tensors(
    shape: Shape, choices: Choices, *, room_bytes: int, in_place: bool
) -> OwnTensors:
    """Return what the model's own tensors take in RAM.

    Parameters
    ----------
    shape, choices
        The model, and what is decided about the run.
    room_bytes
        What the budget leaves beside what streams.
    in_place
        Whether blocks compute in RAM; else the device holds their tensors.
    """
    window, bf16 = choices.window, choices.bf16
    torch = _TORCH_BF16_BYTES if bf16 else _TORCH_BYTES
    if not in_place:
        return OwnTensors({"torch's own": torch})
    logits, chunking = logits_bytes(shape, window, room_bytes=max(0, room_bytes))
    block = backward_bytes(shape, window, bf16=bf16)
    looped = shape.dims.looped
    gradient = max(
        (
            math.prod(size) * 4 * (_STACKED if looped and shape.share(size) < 1 else 1)
            for part in shape.parts
            for _, size in part.params
        ),
        default=0,
    )
    # Small logits lie in the heap, which keeps their room when the turn has freed them and blocks go backward.
    tokens = window.rows if chunking is None else chunking.tokens
    waits = tokens * shape.dims.vocabulary * BYTES_PER_LOGIT < large_bytes(0)
    block = block + logits if waits else max(block, logits)
    items = {
        "inputs of the blocks": border_bytes(shape, window, bf16=bf16),
        ONE_BLOCK: block + gradient,
        "torch's own": torch,
    }
    return OwnTensors(items, chunking, round(_TORN * logits) if waits else 0)


def backward_bytes(shape: Shape, window: Window, *, bf16: bool) -> int:
    """Return what the block that keeps the most takes while it is in backward, in bytes."""
    return round(_BACKWARD_SHARE * largest_kept_bytes(shape, window, bf16=bf16))


def set_aside(own: OwnTensors) -> int:
    """Return what a session sets aside for these before it has run, in bytes."""
    return with_margin(own.num_bytes + SPREAD_BYTES)


def spread_bytes(own: OwnTensors, *, room_bytes: int) -> int:
    """Return what may wait in the heap at the peak, in bytes.

    Parameters
    ----------
    own
        What is taken beside it.
    room_bytes
        What the budget leaves beside what streams. Where that holds it, nothing is given back before it is full.
    """
    if set_aside(own) <= room_bytes:
        return max(SPREAD_BYTES, own.torn_bytes)
    # At a border no more is taken than this; then a block comes.
    most = round(NEARLY_FULL * room_bytes) + own.items.get(ONE_BLOCK, 0)
    waits = max(0, most - own.num_bytes) + _LEAST_SPREAD_BYTES
    return min(waits, SPREAD_BYTES)


def kept_by_block(shape: Shape, choices: Choices) -> dict[int, int]:
    """Return what the calls of each block keep in one window if all do, in bytes."""
    window, bf16 = choices.window, choices.bf16
    sizes = {
        id(part): window.accumulation * kept_bytes(shape, part, window, bf16=bf16)
        for part in shape.parts
    }
    return {
        index: sizes[id(part)]
        for index, (_, part) in enumerate(shape.blocks())
        if part.kind != "head"
    }


def holes_bytes(kept: int) -> int:
    """Return what it costs beside so many bytes if every block keeps its activations, in bytes.

    Where some blocks compute theirs again, what they make fills the holes.
    """
    return round(min(_HOLES_SHARE * kept, _HOLES_BYTES * math.sqrt(kept)))


def keepable_bytes(aside_bytes: int, kept: int) -> int:
    """Return how much of what is set aside for kept activations they may take themselves.

    Parameters
    ----------
    aside_bytes
        What is set aside.
    kept
        What they take if every block keeps its own.

    Examples
    --------
    >>> keepable_bytes(1000, 1000), keepable_bytes(600, 1000)
    (900, 600)
    """
    left = aside_bytes - holes_bytes(kept)
    return left if left >= kept else min(aside_bytes, int(_PARTLY * kept))
