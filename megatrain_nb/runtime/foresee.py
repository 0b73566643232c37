"""What a model's own tensors will take in a window, told from its shape before it runs.

The forecast sets as much aside (`megatrain_nb.plan.own`). So a session decides from its first step on what the
forecast said, and plans again only where the kernel counts something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from megatrain_nb.plan.activation import Window
from megatrain_nb.plan.choices import Choices
from megatrain_nb.plan.own import kept_by_block, own_tensors, set_aside
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
    kept
        For activations if every block keeps them.
    """

    reserved: int
    kept: int


class Foresight:
    """Looks at what a model is called with, and tells what a larger window than any before will take.

    Attributes
    ----------
    window
        The largest that was looked at; of a plain loop, one micro-batch.
    """

    def __init__(self) -> None:
        self.window: Window | None = None
        self._shape: Shape | None = None
        self._most = 0

    def note(
        self, given: tuple[tuple[Any, ...], Mapping[str, Any]], accumulation: int
    ) -> Window | None:
        """Return the window of such a call, and remember the largest; None if nobody knows its size."""
        size = _rows_and_length((*given[1].values(), *given[0]))
        if size is None:
            return None
        batch, seq_len = size
        window = Window(batch=batch, seq_len=seq_len, accumulation=accumulation)
        if self.window is None or window.tokens > self.window.tokens:
            self.window = window
        return window

    def shape(self, model: nn.Module, layers: Layers) -> Shape:
        """Return the model's shape."""
        if self._shape is None:
            self._shape = shape_from(model, layers)
        return self._shape

    def look(
        self,
        model: nn.Module,
        layers: Layers,
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        *,
        accumulation: int,
        room_bytes: int,
    ) -> Foreseen | None:
        """Return what is to come; None if a window as large was there before, or nobody knows its size.

        Parameters
        ----------
        model, layers
            The model, and how it was cut.
        given
            What it is called with.
        accumulation
            Micro-batches of the window.
        room_bytes
            What the budget leaves beside what streams.
        """
        window = self.note(given, accumulation)
        if window is None or window.tokens <= self._most:
            return None
        self._most = window.tokens
        shape = self.shape(model, layers)
        bf16 = any(pack.split for pack in layers.spec.packs)
        choices = Choices(window=window, bf16=bf16)
        own = own_tensors(shape, choices, room_bytes=room_bytes, in_place=True)
        kept = with_margin(sum(kept_by_block(shape, choices).values()))
        return Foreseen(set_aside(own), kept)


def _rows_and_length(values: Iterable[Any]) -> tuple[int, int] | None:
    """Return the first two sizes of the first tensor that has two: token numbers, or their embeddings."""
    for value in values:
        if isinstance(value, Tensor) and value.dim() in (2, 3):
            return int(value.shape[0]), int(value.shape[1])
    return None
