"""What a model's own tensors will take in a window, told from its shape before it runs.

The forecast sets as much aside (`megatrain_nb.plan.own`). So a session decides from its first step on what the
forecast said, and plans again only where the kernel counts something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from megatrain_nb.plan.activation import Window
from megatrain_nb.plan.choices import Choices
from megatrain_nb.plan.own import holes_bytes, kept_by_block, own_tensors, set_aside
from megatrain_nb.plan.reserve import with_margin
from megatrain_nb.runtime.outline import shape_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from megatrain_nb.plan.shape import Shape
    from megatrain_nb.runtime.layers import Layers


class Foreseen(NamedTuple):
    """What to set aside, in bytes.

    Attributes
    ----------
    reserved
        For the model's own tensors.
    kept, beside
        For activations if every block keeps them, and what they cost beside their bytes.
    """

    reserved: int
    kept: int
    beside: int


class Foresight:
    """Looks at what a model is called with, and tells what a larger window than any before will take.

    Attributes
    ----------
    largest
        The model's shape, and the largest window so far; None before the first, and where nobody knows its size.
    """

    def __init__(self) -> None:
        self.largest: tuple[Shape, Window] | None = None

    def look(
        self,
        model: nn.Module,
        layers: Layers,
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        *,
        accumulation: int,
    ) -> bool:
        """Return whether a window is larger than any before; False where nobody knows its size.

        Parameters
        ----------
        model, layers
            The model, and how it was cut.
        given
            What it is called with.
        accumulation
            Micro-batches of the window.
        """
        size = _rows_and_length((*given[1].values(), *given[0]))
        if size is None:
            return False
        window = Window(batch=size[0], seq_len=size[1], accumulation=accumulation)
        if self.largest is None:
            self.largest = shape_from(model, layers), window
            return True
        shape, most = self.largest
        if window.tokens > most.tokens:
            self.largest = shape, window
        return window.tokens > most.tokens

    def tell(self, layers: Layers, room_bytes: int) -> Foreseen:
        """Return what the largest window takes; ``room_bytes`` is what the budget leaves beside what streams."""
        assert self.largest is not None
        shape, window = self.largest
        bf16 = any(pack.split for pack in layers.spec.packs)
        choices = Choices(window=window, bf16=bf16)
        own = own_tensors(shape, choices, room_bytes=room_bytes, in_place=True)
        kept = with_margin(sum(kept_by_block(shape, choices).values()))
        return Foreseen(set_aside(own), kept, holes_bytes(kept))


def _rows_and_length(values: Iterable[Any]) -> tuple[int, int] | None:
    """Return the first two sizes of the first tensor that has two: token numbers, or their embeddings."""
    for value in values:
        if isinstance(value, Tensor) and value.dim() in (2, 3):
            return int(value.shape[0]), int(value.shape[1])
    return None
