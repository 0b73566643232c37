"""What a checkpoint says of one model: what it is, what of it is not in tiles, and how that comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain_nb.codec.choice import safe_codec
from megatrain_nb.codec.dynamic import role_of
from megatrain_nb.codec.names import DYNAMIC, NAMES, RAW
from megatrain_nb.errors import ModelError, StoreError
from megatrain_nb.runtime.layers import names_of
from megatrain_nb.runtime.piece import Piece, What, master_of, moments_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from megatrain_nb.runtime.layers import Layers
    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.store.checkpoint import Checkpoint
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


def check_state(
    model: OffloadedModel, state: dict[str, Any], manifest: Manifest, *, prefix: str
) -> None:
    """Find out before anything changes whether a model can go on from a state and its tiles.

    Raises
    ------
    ModelError
        The checkpoint's optimizer has other parameter groups.
    StoreError
        Codecs or tiles that do not belong to this model: it is damaged.
    BudgetError
        The model does not fit with the moments that it had.
    """
    _check_groups(model, state)
    layers = _layers_of(model, state)
    if type(state.get("rounding_seed")) is not int:
        msg = "the checkpoint does not say the seed of the rounding"
        raise StoreError(msg)
    model.memory.check(layers.spec)
    known = {
        prefix + name
        for pack in layers.spec.packs
        for what in (*master_of(pack), *moments_of(pack))
        for name in model.pager.names(Piece(pack, what))
    }
    of_model = {name for name in manifest.tiles if name.startswith(prefix)}
    strange = sorted(of_model - known)
    if strange:
        msg = (
            f"the checkpoint has a tile {strange[0]!r} that this version does not know for the model; go on with the "
            "version that took it"
        )
        raise StoreError(msg)


def _layers_of(model: OffloadedModel, state: dict[str, Any]) -> Layers:
    """Return the model's cut with the codecs that its moments had."""
    codecs, asked = state.get("codecs"), state.get("asked")
    for given in (codecs, asked):
        if not isinstance(given, dict) or given.keys() != model.adam.codecs.keys():
            msg = (
                "the checkpoint does not say which codec each parameter's moments have"
            )
            raise StoreError(msg)
    assert codecs is not None
    assert asked is not None
    for home in model.layers.homes.values():
        name, table = home.spec.name, home.spec.name in model.layers.tables
        codec, role = codecs[name], role_of(home.spec.shape, table=table)
        known = codec == RAW or (codec in NAMES and codec != DYNAMIC)
        if (
            not known
            or safe_codec(codec, role) != codec
            or asked[name] not in (RAW, *NAMES)
        ):
            msg = f"the checkpoint has moments of {name} as {codec!r}, which this version does not know"
            raise StoreError(msg)
    return model.layers.with_codecs(codecs)


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
    for name, value in state["buffers"].items():
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
    layers, pager = _layers_of(model, state), model.pager
    model.updates.chooser.forget()
    for pack in layers.spec.packs:
        if pack != pager.packs[pack.index]:
            pager.swap(pack, [Piece(pack, what) for what in moments_of(pack)])
    model.use_layers(layers)
    if model.adam.asked != state["asked"]:
        model.adam.asked = dict(state["asked"])
        model.session.note(_OTHER_CODECS)


def _check_groups(model: OffloadedModel, state: dict[str, Any]) -> None:
    """Raise ModelError if an optimizer has other groups of parameters than in a checkpoint."""
    if model.optimizer is None or state["groups"] is None:
        return
    names = names_of(model.model)
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
