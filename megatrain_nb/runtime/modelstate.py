"""What a checkpoint says of one model: what it is, what of it is not in tiles, and how that comes back.

What comes back has passed `megatrain_nb.runtime.statecheck`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain_nb.runtime.layers import names_of
from megatrain_nb.runtime.piece import Piece, What, moments_of
from megatrain_nb.runtime.statecheck import kind_of, layers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.store.manifest import Manifest

_OTHER_CODECS = (
    "the checkpoint was taken with another optimizer_compression than this session's: the model's moments stay as they "
    "were then, bit for bit; mt.recompress(model, codec) converts them"
)

# Without the fp32 master a split pack would not be what it was: both halves are the weights.
_WEIGHTS = (What.WEIGHTS, What.LOW)


def identity(model: OffloadedModel) -> dict[str, Any]:
    """Return what must be the same where a checkpoint is to be used: names, shapes, dtypes, pieces; JSON."""
    spec, pager = model.layers.spec, model.pager
    packs: dict[str, Any] = {
        pack.name: {
            "index": pack.index,
            "computes in": "bfloat16" if pack.split else "float32",
            "elements": pack.numel,
            "parameters": {
                param.name: {"shape": list(param.shape), "offset": param.offset}
                for param in pack.params
            },
            "pieces": {},
        }
        for pack in spec.packs
    }
    for piece in pager.kept_pieces(*_WEIGHTS):
        pieces = packs[piece.pack.name]["pieces"]
        pieces[piece.what.value] = {
            "dtype": str(piece.dtype),
            "bytes": piece.num_bytes,
        }
    persistent = model.model.state_dict().keys()
    return {
        "blocks": {
            block.name: [spec.packs[index].name for index in block.packs]
            for block in spec.blocks
        },
        "packs": packs,
        "elements of a tile": pager.tile_numel,
        "ordinary parameters": {
            name: kind_of(param) for name, param in model.layers.resident.items()
        },
        "buffers": {
            name: kind_of(buffer)
            for name, buffer in model.model.named_buffers()
            if name in persistent
        },
    }


def state_of(model: OffloadedModel) -> dict[str, Any]:
    """Return what of a model and its optimizer is not in tiles."""
    names = names_of(model.model)
    optimizer = model.optimizer
    groups = None
    if optimizer is not None:
        groups = [
            group | {"params": [names[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
    return {
        "num_steps": model.steps.done,
        "steps": {names[param]: count for param, count in model.adam.steps.items()},
        "groups": groups,
        "ordinary": {name: x.detach() for name, x in model.layers.resident.items()},
        "moments": {
            names[param]: list(moments) for param, moments in model.adam.moments.items()
        },
        "buffers": dict(model.model.named_buffers()),
        "fusing": None if model.fusing is None else model.fusing.state_dict(),
        "codecs": model.adam.codecs,
        "asked": model.adam.asked,
        "rounding_seed": model.adam.rounding_seed,
        "opaque": model.pager.opaque,
    }


def restore_model(
    model: OffloadedModel,
    state: dict[str, Any],
    manifest: Manifest,
    *,
    prefix: str,
    weights_only: bool,
) -> None:
    """Bring one model back: its tiles become those of the manifest, without a byte read or written.

    Parameters
    ----------
    state
        From `state_of`.
    manifest
        Pinned; its tiles' names begin with ``prefix``.
    """
    params = dict(model.model.named_parameters())
    pager = model.pager
    if not weights_only:
        _take_codecs(model, state)
    keys = {}
    for piece in pager.kept_pieces(*(_WEIGHTS if weights_only else ())):
        pager.discard(piece.pack.index, piece.what)
        keys.update(
            {
                key: prefix + name
                for name, key in pager.names(piece).items()
                if prefix + name in manifest.tiles
            }
        )
    model.session.store.restore(manifest, keys)
    with torch.no_grad():
        for name, value in state["ordinary"].items():
            params[name].copy_(value)
    there = dict(model.model.named_buffers())
    for name, value in state["buffers"].items():
        if name in there:
            _set_buffer(model.model, name, value)
    if not weights_only:
        _restore_optimizer(model, state, params)


def _restore_optimizer(
    model: OffloadedModel, state: dict[str, Any], params: dict[str, nn.Parameter]
) -> None:
    """Bring back what belongs to steps and is not in tiles."""
    model.session.models.plan()
    model.adam.rounding_seed = state["rounding_seed"]
    model.pager.opaque = state["opaque"]
    model.steps.done = state["num_steps"]
    model.adam.steps.clear()
    model.adam.steps.update(
        {params[name]: count for name, count in state["steps"].items()}
    )
    model.adam.moments.clear()
    for name, (first, second) in state["moments"].items():
        device = params[name].device
        model.adam.moments[params[name]] = first.to(device), second.to(device)
    if model.fusing is not None and state["fusing"] is not None:
        model.fusing.load_state_dict(state["fusing"])
    if model.optimizer is not None and state["groups"] is not None:
        _set_groups(model.optimizer, state["groups"])
        model.optimizer.state.clear()
        model.optimizer.note_state()
    model.saved_version = model.executor.version


def _take_codecs(model: OffloadedModel, state: dict[str, Any]) -> None:
    """Let moments have the codecs that they had; what they hold now is forgotten."""
    layers, pager = layers_of(model, state), model.pager
    model.updates.chooser.forget()
    for pack in layers.spec.packs:
        if pack != pager.packs[pack.index]:
            pager.swap(pack, [Piece(pack, what) for what in moments_of(pack)])
    model.use_layers(layers)
    if model.adam.asked != state["asked"]:
        model.adam.asked = dict(state["asked"])
        model.session.note(_OTHER_CODECS)


def _set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Any]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)  # others may hold this very tensor
            else:
                group[key] = value


def _set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    now = model.get_buffer(name)
    if kind_of(now) == kind_of(value):
        with torch.no_grad():
            now.copy_(value)
    else:
        module._buffers[last] = value.to(now.device)
