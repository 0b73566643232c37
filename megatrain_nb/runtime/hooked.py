"""Weights that accelerate keeps elsewhere: taken from its files, and its hooks taken off.

accelerate leaves a module's weights on the meta device, and brings them in around each call, from RAM or from files.
Here the runtime does that, so it needs the files, and nobody else between the module and its caller.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain_nb.errors import ModelError
from megatrain_nb.runtime.lazy import at, lazy
from megatrain_nb.runtime.leaves import FilePart, tree_of
from megatrain_nb.runtime.shards import open_file
from megatrain_nb.store.infile import InFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from megatrain_nb.runtime.lazy import LazyTensor


def take_from_hooks(model: nn.Module, most_bytes: int) -> None:
    """Let a model that accelerate dispatched be an ordinary one, its weights still in their files.

    Parameters
    ----------
    most_bytes
        What a file's header may take of RAM.

    Raises
    ------
    ModelError
        Weights are kept in a way that is not known here.
    StoreError
        A file is missing or damaged.
    """
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    if not hooked:
        return
    from accelerate.hooks import remove_hook_from_module  # noqa: PLC0415

    made: dict[nn.Parameter, nn.Parameter] = {}
    found = [(module, hook) for module in hooked for hook in _offloading(module)]
    taken: list[tuple[nn.Module, str, Any]] = []

    @cache  # a file's header speaks of all its tensors, and its map of one after the other
    def opened(path: str) -> dict[str, LazyTensor]:
        return open_file(InFile(Path(path)), most_bytes=most_bytes)

    for module, hook in found:
        tensors: dict[str, Tensor] = dict(
            module.named_parameters(recurse=hook.place_submodules)
        )
        tensors |= dict(module.named_buffers(recurse=hook.place_submodules))
        for name, tensor in tensors.items():
            if tensor.device.type == "meta":
                value = _find(hook.weights_map, name, tensor, opened)
                taken.append((module, name, value))
    for module, name, value in taken:
        owner, _, last = name.rpartition(".")
        place = module.get_submodule(owner)
        before = place._parameters.get(last)
        if before is None:
            place._buffers[last] = value
            continue
        made.setdefault(before, nn.Parameter(value, requires_grad=before.requires_grad))
        place._parameters[last] = made[before]
    for _, hook in found:
        hook.offload = False  # else it would bring all weights into RAM as it leaves
    remove_hook_from_module(model, recurse=True)
    if hasattr(
        model, "tie_weights"
    ):  # accelerate gave each module a parameter of its own
        model.tie_weights()  # type: ignore[operator]
    model.__dict__.pop("hf_device_map", None)


def _offloading(module: nn.Module) -> Iterator[Any]:
    hook: Any = module._hf_hook
    for each in getattr(hook, "hooks", [hook]):
        if getattr(each, "offload", False) and each.weights_map is not None:
            yield each


def _find(
    weights: Any,
    name: str,
    tensor: Tensor,
    opened: Callable[[str], dict[str, LazyTensor]],
) -> LazyTensor:
    """Return where a tensor's values are; the map is one of accelerate's, or a dictionary."""
    while hasattr(weights, "dataset") and hasattr(weights, "prefix"):
        weights, name = weights.dataset, weights.prefix + name
    in_ram = weights if isinstance(weights, dict) else getattr(weights, "state_dict", {})  # fmt: skip
    known = getattr(weights, "index", {}).get(name)
    if name in in_ram:
        found = lazy(tree_of(name, in_ram[name]))
    elif known is not None and known.get("safetensors_file"):
        tensors = opened(known["safetensors_file"])
        found = tensors[known.get("weight_name", name)]
    elif known is not None and weights.save_folder is not None:
        dtype = getattr(torch, known["dtype"])
        file = InFile(Path(weights.save_folder) / f"{name}.dat")
        found = lazy(at(FilePart(name, file, 0, tuple(known["shape"]), dtype)))
    else:
        msg = f"{name} is on the meta device, and accelerate's hook does not say where its values are; load the model with mt.from_pretrained"
        raise ModelError(msg)
    if tuple(found.shape) != tuple(tensor.shape):
        msg = f"{name} has shape {tuple(tensor.shape)}, and {tuple(found.shape)} where accelerate keeps it"
        raise ModelError(msg)
    return found if found.dtype == tensor.dtype else found.to(tensor.dtype)  # type: ignore[return-value]
