"""Cut a model into blocks, and let each block's call go through the executor.

The model's own ``forward`` always runs; only the blocks' calls are intercepted, through an instance
attribute that hides the class's ``forward``. A block is a decoder layer, or any other module that
owns parameters. Which modules are layers, the model says itself (``_no_split_modules``: what must be
on one device to be called); without that, the children of a list or a sequence are taken as layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain_nb.codec.choice import Compression
from megatrain_nb.errors import ArgumentError, ModelError
from megatrain_nb.plan.model import (
    BlockSpec,
    ModelSpec,
    PackSpec,
    ParamSpec,
    pack_params,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


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

    @property
    def dtype(self) -> torch.dtype:
        """What the parameter computes in."""
        return torch.bfloat16 if self.pack.split else torch.float32


def part_of(flat: Tensor, home: Home) -> Tensor:
    """Return a parameter's values as a view of its pack's flat vector."""
    spec = home.spec
    return flat[spec.offset : spec.offset + spec.numel].view(spec.shape)


@dataclass(frozen=True)
class Layers:
    """A model, cut.

    Attributes
    ----------
    homes
        For each streamed parameter, where its bytes are; in the order of ``model.parameters()``.
    resident
        Parameters that modules around the blocks own directly; they stay ordinary ones.
    given
        For each streamed parameter, what it was when the model was cut.
    tables
        Names of the embeddings' and the head's parameters.
    """

    spec: ModelSpec
    blocks: tuple[Block, ...]
    homes: dict[nn.Parameter, Home]
    resident: dict[str, nn.Parameter]
    given: dict[nn.Parameter, torch.dtype]
    tables: frozenset[str]

    def with_codecs(self, codecs: Mapping[str, str]) -> Layers:
        """Return the same cut with these codecs of moments, by parameter name; others stay."""
        packs = tuple(pack.with_codecs(codecs) for pack in self.spec.packs)
        specs = {param.name: param for pack in packs for param in pack.params}
        return replace(
            self,
            spec=replace(self.spec, packs=packs),
            homes={
                param: Home(packs[home.pack.index], specs[home.spec.name])
                for param, home in self.homes.items()
            },
        )


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return what a model is asked to compute in.

    Raises
    ------
    ArgumentError
        Neither float32 nor bfloat16, nor None.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    found = known.get(dtype) if isinstance(dtype, str) else dtype
    if found not in known.values() and dtype is not None:
        msg = (
            f"dtype={dtype!r} cannot be trained here; give torch.float32, or torch.bfloat16 (bf16 compute with an "
            "fp32 master)"
        )
        raise ArgumentError(msg)
    return found


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the name of each parameter, of a tied one the first."""
    return {param: name for name, param in model.named_parameters()}


def cut(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    compression: Compression | None = None,
) -> Layers:
    """Find the blocks of a model and lay out their parameters.

    Parameters
    ----------
    model
        Its float32 parameters become fp32 packs, its bfloat16 ones split packs.
    dtype
        float32 or bfloat16: take all of them as these.
    compression
        Of Adam's moments; None: they are fp32.

    Raises
    ------
    ModelError
        No parameters, or some that can be neither.
    """
    names = names_of(model)
    if not names:
        msg = f"{type(model).__name__} has no parameters to train"
        raise ModelError(msg)
    for param, name in names.items():
        if param.dtype not in (torch.float32, torch.bfloat16):
            msg = (
                f"{name} is {str(param.dtype).removeprefix('torch.')}; load or make the model with "
                "dtype=torch.float32, or with dtype=torch.bfloat16 for bf16 compute with an fp32 master"
            )
            raise ModelError(msg)
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            msg = f"{name} has a gradient hook, which would not run; remove it, or change gradients between backward and step"
            raise ModelError(msg)
    blocks: list[Block] = []
    packs: list[PackSpec] = []
    homes: dict[nn.Parameter, Home] = {}
    tables = _tables(model)
    compression = compression or Compression()
    codecs = {
        name: compression.codec_of(name, param.shape, table=param in tables)
        for param, name in names.items()
    }
    for name, module in _find(model):
        sites = tuple(_sites(module))
        own = list(
            dict.fromkeys(site.param for site in sites if site.param not in homes)
        )
        halves = [param for param in own if (dtype or param.dtype) == torch.bfloat16]
        whole = [param for param in own if param not in set(halves)]
        for params in (halves, whole):
            if not params:
                continue
            both = bool(halves and whole)
            pack = pack_params(
                len(packs),
                f"{name} (fp32)" if both and params is whole else name,
                [(names[param], tuple(param.shape)) for param in params],
                split=params is halves,
                codecs=codecs,
            )
            packs.append(pack)
            homes.update(
                {
                    param: Home(pack, spec)
                    for param, spec in zip(params, pack.params, strict=True)
                }
            )
        used = tuple(dict.fromkeys(homes[site.param].pack.index for site in sites))
        blocks.append(
            Block(BlockSpec(index=len(blocks), name=name, packs=used), module, sites)
        )
    resident = {name: param for param, name in names.items() if param not in homes}
    for name, param in resident.items():
        if param.requires_grad and (dtype or param.dtype) == torch.bfloat16:
            msg = (
                f"{name} lies beside the blocks, so it stays an ordinary parameter, and there is no fp32 master for "
                f"those; freeze it ({name}.requires_grad_(False)), or train the model in fp32"
            )
            raise ModelError(msg)
    return Layers(
        spec=ModelSpec(
            blocks=tuple(block.spec for block in blocks), packs=tuple(packs)
        ),
        blocks=tuple(blocks),
        homes={param: homes[param] for param in names if param in homes},
        resident=resident,
        given={param: param.dtype for param in homes},
        tables=frozenset(names[param] for param in tables),
    )


def _tables(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters with a row for each token or place: those of embeddings and of the head.

    The head is what transformers calls the output embeddings; in a model that does not say, a linear map on
    the top level that gives as many numbers as the largest embedding has rows.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    rows = max((module.num_embeddings for module in embeddings), default=0)
    told: Any = getattr(model, "get_output_embeddings", lambda: None)
    heads: list[Any] = [told()]
    if heads[0] is None:
        heads = [
            module
            for module in model.children()
            if isinstance(module, nn.Linear) and module.out_features == rows
        ]
    weights = [getattr(module, "weight", None) for module in (*embeddings, *heads)]
    return {weight for weight in weights if isinstance(weight, nn.Parameter)}


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
