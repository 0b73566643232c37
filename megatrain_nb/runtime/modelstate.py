"""What a checkpoint says of one model: what it is, what of it is not in tiles, and how that comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain_nb.codec.names import DYNAMIC
from megatrain_nb.errors import ModelError
from megatrain_nb.runtime.pager import MOMENTS, Piece, What, master_of, moments_of
from megatrain_nb.runtime.recode import recode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.store.checkpoint import Checkpoint
    from megatrain_nb.store.manifest import Manifest

# Without the fp32 master a split pack would not be what it was: both halves are the weights.
_WEIGHTS = (What.WEIGHTS, What.LOW)
MOMENT_KINDS = (*MOMENTS, What.ENCODED)


def identity(
    model: OffloadedModel, codecs: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what must be the same where a checkpoint is to be used: names, shapes, dtypes, pieces; JSON.

    With ``codecs`` as it would be if moments had these, by parameter.
    """
    spec, pager = model.layers.with_codecs(codecs or {}).spec, model.pager
    packs: dict[str, Any] = {
        pack.name: {
            "index": pack.index,
            "computes in": "bfloat16" if pack.split else "float32",
            "elements": pack.numel,
            "parameters": {
                param.name: {
                    "shape": list(param.shape),
                    "offset": param.offset,
                    "moments": param.codec,
                }
                for param in pack.params
            },
            "pieces": {},
        }
        for pack in spec.packs
    }
    for pack in spec.packs:
        pieces = [Piece(pack, what) for what in (*master_of(pack), *moments_of(pack))]
        packs[pack.name]["pieces"] = {
            piece.label: {"dtype": str(piece.dtype), "bytes": piece.num_bytes}
            for piece in pieces
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
            name: _kind(param) for name, param in model.layers.resident.items()
        },
        "buffers": {
            name: _kind(buffer)
            for name, buffer in model.model.named_buffers()
            if name in persistent
        },
    }


def check_same(saved: Any, here: list[Any], checkpoint: Checkpoint) -> None:
    """Raise ModelError that names the first difference between a checkpoint's models and those here."""
    found = ""
    if not isinstance(saved, list) or len(saved) != len(here):
        count = len(saved) if isinstance(saved, list) else 0
        found = f"it holds {count} models, and {len(here)} are in the session"
    for index, (one, other) in enumerate(zip(saved, here, strict=False)):
        for section in other:
            where = section if len(here) == 1 else f"model {index}, {section}"
            found = found or _difference(one.get(section), other[section], where)
    if found:
        msg = (
            f"{checkpoint!r} is of another model than the one here: {found}. Make the model as it was when the "
            "checkpoint was taken (config, dtype, order of models)"
        )
        raise ModelError(msg)


def codecs_to_take(model: OffloadedModel, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the codecs that moments had in a checkpoint, where a model lets them change while it trains."""
    here = model.codecs
    return {
        name: codec
        for name, codec in state["codecs"].items()
        if model.asked.get(name) == DYNAMIC and here.get(name) != codec
    }


def state_of(model: OffloadedModel) -> dict[str, Any]:
    """Return what of a model and its optimizer is not in tiles."""
    names = {param: name for name, param in model.model.named_parameters()}
    optimizer = model.optimizer
    groups = None
    if optimizer is not None:
        groups = [
            group | {"params": [names[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
    return {
        "num_steps": model.num_steps,
        "steps": {names[param]: count for param, count in model.steps.items()},
        "groups": groups,
        "ordinary": {name: x.detach() for name, x in model.layers.resident.items()},
        "moments": {
            names[param]: list(moments) for param, moments in model.moments.items()
        },
        "buffers": dict(model.model.named_buffers()),
        "fusing": None if model.fusing is None else model.fusing.state_dict(),
        "opaque": model.pager.opaque,
        "codecs": model.codecs,
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
        for piece in pager.kept_pieces(*MOMENT_KINDS):
            pager.discard(piece.pack.index, piece.what)
        recode(
            model, codecs_to_take(model, state)
        )  # of nothing: they only change their form
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
    for name, value in state["buffers"].items():
        _set_buffer(model.model, name, value)
    if not weights_only:
        _restore_optimizer(model, state, params)


def _restore_optimizer(
    model: OffloadedModel, state: dict[str, Any], params: dict[str, nn.Parameter]
) -> None:
    """Bring back what belongs to steps and is not in tiles."""
    model.pager.opaque = state["opaque"]
    model.num_steps = state["num_steps"]
    model.steps.clear()
    model.steps.update({params[name]: count for name, count in state["steps"].items()})
    model.moments.clear()
    for name, (first, second) in state["moments"].items():
        device = params[name].device
        model.moments[params[name]] = first.to(device), second.to(device)
    if model.fusing is not None and state["fusing"] is not None:
        model.fusing.load_state_dict(state["fusing"])
    if model.optimizer is not None and state["groups"] is not None:
        _set_groups(model.optimizer, state["groups"])
        model.rounding_seed = state["groups"][0]["rounding_seed"]
        model.optimizer.state.clear()
        model.optimizer.note_state()
    model.saved_version = model.executor.version


def check_groups(model: OffloadedModel, state: dict[str, Any]) -> None:
    """Raise ModelError if an optimizer has other groups of parameters than in a checkpoint."""
    if model.optimizer is None or state["groups"] is None:
        return
    names = {param: name for name, param in model.model.named_parameters()}
    here = [
        [names[param] for param in group["params"]]
        for group in model.optimizer.param_groups
    ]
    found = _difference(
        [group["params"] for group in state["groups"]], here, "parameter groups"
    )
    if found:
        msg = f"the checkpoint's optimizer has other parameter groups than the one here: {found}"
        raise ModelError(msg)


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
    now = module._buffers.get(last)
    if now is not None and _kind(now) == _kind(value):
        with torch.no_grad():
            now.copy_(value)
    elif now is not None:
        module._buffers[last] = value.to(now.device)


def _kind(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def _difference(saved: Any, here: Any, where: str) -> str:
    """Name the first place where two JSON trees differ; empty if they do not."""
    one, other = dict(_leaves(saved, where)), dict(_leaves(here, where))
    for path in [*one, *other]:
        if path not in other:
            return f"{path} is missing here"
        if path not in one:
            return f"{path} is not in the checkpoint"
        if one[path] != other[path]:
            return f"{path} is {one[path]!r} in the checkpoint and {other[path]!r} here"
    return ""


def _leaves(tree: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{where}, {key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{where}[{index}]")
    else:
        yield where, tree
