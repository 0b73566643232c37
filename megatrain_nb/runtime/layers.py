"""Cut a model into blocks, and let each block's call go through the executor.

The model's own ``forward`` always runs; only the blocks' calls are intercepted, through an instance
attribute that hides the class's ``forward``. A block is a decoder layer, or any other module that
owns parameters. Which modules are layers, the model says itself (``_no_split_modules``: what must be
on one device to be called); without that, the children of a list or a sequence are taken as layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain_nb.errors import ModelError
from megatrain_nb.plan.model import (
    BlockSpec,
    ModelSpec,
    PackSpec,
    ParamSpec,
    pack_params,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a block's modules refer to a parameter."""

    module: nn.Module
    name: str
    param: nn.Parameter


@dataclass(eq=False)
class Block:
    """What computes as one piece: a module, its own forward, and where its parameters are named."""

    spec: BlockSpec
    module: nn.Module
    sites: tuple[Site, ...]
    forward: Callable[..., Any] = field(init=False)
    _own: Any = field(init=False)

    def __post_init__(self) -> None:
        self.forward = self.module.forward
        self._own = self.module.__dict__.get("forward")

    @property
    def name(self) -> str:
        """The module's name in the model."""
        return self.spec.name

    def intercept(self, call: Callable[..., Any]) -> None:
        """Send calls of the module's forward to ``call(block, args, kwargs)``."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(self, args, kwargs)

        self.module.forward = forward

    def restore(self) -> None:
        """Undo `intercept`."""
        self.module.__dict__.pop("forward", None)
        if self._own is not None:
            self.module.forward = self._own


@dataclass(frozen=True, slots=True)
class Home:
    """Where a parameter's bytes are: its pack, and its place in it."""

    pack: PackSpec
    spec: ParamSpec


@dataclass(frozen=True)
class Layers:
    """A model, cut.

    Attributes
    ----------
    homes
        For each streamed parameter, where its bytes are; in the order of ``model.parameters()``.
    resident
        Parameters that modules around the blocks own directly; they stay ordinary ones.
    """

    spec: ModelSpec
    blocks: tuple[Block, ...]
    homes: dict[nn.Parameter, Home]
    resident: dict[str, nn.Parameter]


def cut(model: nn.Module) -> Layers:
    """Find the blocks of a model and lay out their parameters.

    Raises
    ------
    ModelError
        No parameters, or some that are not float32.
    """
    names = {param: name for name, param in model.named_parameters()}
    if not names:
        msg = f"{type(model).__name__} has no parameters to train"
        raise ModelError(msg)
    for param, name in names.items():
        if param.dtype != torch.float32:
            msg = (
                f"{name} is {str(param.dtype).removeprefix('torch.')}; training keeps fp32 weights, so load or make "
                "the model with dtype=torch.float32 (bf16 compute with an fp32 master comes in a later version)"
            )
            raise ModelError(msg)
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            msg = f"{name} has a gradient hook, which would not run; remove it, or change gradients between backward and step"
            raise ModelError(msg)
    blocks: list[Block] = []
    packs: list[PackSpec] = []
    homes: dict[nn.Parameter, Home] = {}
    for name, module in _find(model):
        sites = tuple(_sites(module))
        own = list(
            dict.fromkeys(site.param for site in sites if site.param not in homes)
        )
        if own:
            pack = pack_params(
                len(packs), name, [(names[param], tuple(param.shape)) for param in own]
            )
            packs.append(pack)
            homes.update(
                {
                    param: Home(pack, spec)
                    for param, spec in zip(own, pack.params, strict=True)
                }
            )
        used = tuple(dict.fromkeys(homes[site.param].pack.index for site in sites))
        blocks.append(
            Block(BlockSpec(index=len(blocks), name=name, packs=used), module, sites)
        )
    return Layers(
        spec=ModelSpec(
            blocks=tuple(block.spec for block in blocks), packs=tuple(packs)
        ),
        blocks=tuple(blocks),
        homes={param: homes[param] for param in names if param in homes},
        resident={name: param for param, name in names.items() if param not in homes},
    )


def _find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks' modules, in the order in which they are registered."""
    layer_classes = frozenset(getattr(model, "_no_split_modules", None) or ())
    seen: set[nn.Module] = set()

    def is_layer(module: nn.Module, parent: nn.Module | None) -> bool:
        if parent is None or not _has_parameters(module):
            return False
        if type(module).__name__ in layer_classes:
            return True
        return isinstance(parent, nn.ModuleList | nn.Sequential) and not holds_layers(
            module
        )

    def holds_layers(module: nn.Module) -> bool:
        return any(
            type(inner).__name__ in layer_classes
            or (
                not layer_classes
                and isinstance(inner, nn.ModuleList | nn.Sequential)
                and len(inner) > 1
            )
            for inner in module.modules()
            if inner is not module and _has_parameters(inner)
        )

    def visit(
        name: str, module: nn.Module, parent: nn.Module | None
    ) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or not _has_parameters(module):
            return
        owns = any(param is not None for param in module._parameters.values())
        inside_list = any(
            isinstance(inner, nn.ModuleList | nn.Sequential)
            for inner in module.modules()
        )
        if is_layer(module, parent) or (
            owns and not holds_layers(module) and not inside_list
        ):
            seen.update(module.modules())
            yield name or type(module).__name__, module
            return
        for child_name, child in module.named_children():
            yield from visit(
                f"{name}.{child_name}" if name else child_name, child, module
            )

    return visit("", model, None)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _sites(module: nn.Module) -> Iterator[Site]:
    for inner in module.modules():
        for name, param in inner._parameters.items():
            if param is not None:
                yield Site(inner, name, param)
