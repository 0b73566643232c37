"""A block while its weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from megatrain_nb.errors import ModelError
from megatrain_nb.runtime.kept import Later

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from megatrain_nb.runtime.executor import Executor
    from megatrain_nb.runtime.keeping import Keeping
    from megatrain_nb.runtime.layers import Block


class Bound:
    """A loaded block: inside ``with``, its modules hold ordinary parameters over the loaded weights.

    Attributes
    ----------
    plain
        The ordinary parameter for each streamed one.
    flats
        The loaded weights of each of its packs, flat.
    later
        Where the graphs of kept calls find their weights when backward comes.
    landed
        For a parameter whose gradient has a home: brings it there.
    sums
        Where the bf16 gradients of a split parameter add up in fp32.
    """

    def __init__(
        self, executor: Executor, block: Block, flats: dict[int, Tensor]
    ) -> None:
        self.plain: dict[nn.Parameter, nn.Parameter] = {}
        self.flats = flats
        self.later = Later(block.name, executor.version)
        self.landed: dict[nn.Parameter, Callable[[Tensor], None]] = {}
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._executor = executor
        self._block = block
        self._since: Any = None
        self._packs = {
            flat.untyped_storage().data_ptr(): pack for pack, flat in flats.items()
        }

    @property
    def name(self) -> str:
        """The block's name."""
        return self._block.name

    def pack_at(self, address: int) -> int | None:
        """Return the pack whose weights' storage starts at an address, or None."""
        return self._packs.get(address)

    @property
    def version(self) -> int:
        """The count of weight changes now."""
        return self._executor.version

    @property
    def keeping(self) -> Keeping:
        """The budget of kept activations."""
        return self._executor.keeping

    def add_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """Do what autograd does for a parameter, for a graph that was made with another one's weights."""
        plain = self.plain[param]
        if plain.grad is not None:
            plain.grad.add_(grad)
            return
        plain.grad = grad
        if param in self.landed:
            self.landed[param](plain)

    def __enter__(self) -> Self:
        for site in self._block.sites:
            if site.module._parameters.get(site.name) is not site.param:
                msg = (
                    f"{self._block.name}: its parameter {site.name!r} was replaced after the model moved into the "
                    "session; change values in place (under torch.no_grad()), or mt.unwrap(model) first"
                )
                raise ModelError(msg)
        for site in self._block.sites:
            site.module._parameters[site.name] = self.plain[site.param]
        self._executor.inside = self._block
        self._since = self._executor.device.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.device.since(self._since)
        self._executor.inside = None
        for site in self._block.sites:
            site.module._parameters[site.name] = site.param
        if kind is None:
            self._executor.between_calls()
