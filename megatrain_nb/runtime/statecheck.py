"""Whether what a checkpoint says of a model can be that model's: found out before anything changes.

A checkpoint is data from anywhere. Its checksums say that it is as it was written, not who wrote it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatrain_nb.codec.choice import safe_codec
from megatrain_nb.codec.dynamic import role_of
from megatrain_nb.codec.names import DYNAMIC, NAMES, RAW
from megatrain_nb.errors import ModelError, StoreError
from megatrain_nb.runtime.fuse import Fusing
from megatrain_nb.runtime.layers import names_of
from megatrain_nb.runtime.optimizer import config_of
from megatrain_nb.runtime.piece import Piece, What, master_of, moments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from megatrain_nb.runtime.layers import Layers
    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.store.checkpoint import Checkpoint
    from megatrain_nb.store.manifest import Manifest

_MAX_STEP = 2**53
_MAX_SHOWN = 80
_MISSING = object()


def check_same(saved: Any, here: list[Any], checkpoint: Checkpoint) -> None:
    """Raise ModelError that names the first difference between a checkpoint's models and those here."""
    found = ""
    if not isinstance(saved, list) or len(saved) != len(here):
        count = len(saved) if isinstance(saved, list) else 0
        found = f"it holds {count} models, and {len(here)} are in the session"
    for index, (one, other) in enumerate(zip(saved, here, strict=False)):
        for section in other:
            where = section if len(here) == 1 else f"model {index}, {section}"
            there = one.get(section) if isinstance(one, dict) else None
            found = found or _difference(there, other[section], where)
    if found:
        msg = (
            f"{checkpoint!r} is of another model than the one here: {found}. Make the model as it was when the "
            "checkpoint was taken (config, dtype, order of models)"
        )
        raise ModelError(msg)


def check_state(
    model: OffloadedModel, state: dict[str, Any], manifest: Manifest, *, prefix: str
) -> None:
    """Find out before anything changes whether a model can go on from a state and its tiles.

    Raises
    ------
    ModelError
        The checkpoint's optimizer has other parameter groups.
    StoreError
        Values, codecs or tiles that do not belong to this model: it is damaged.
    BudgetError
        The model does not fit with the moments that it had.
    """
    _check_groups(model, state)
    layers = layers_of(model, state)
    check_weights(model, state, manifest, prefix=prefix)
    _check_values(model, state)
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


def check_weights(
    model: OffloadedModel, state: dict[str, Any], manifest: Manifest, *, prefix: str
) -> None:
    """Raise StoreError if a state and its tiles are not the weights and buffers of a model.

    A tile of weights that is missing would read as zeros.
    """
    pager = model.pager
    for piece in pager.kept_pieces(What.WEIGHTS):
        for name in pager.names(piece):
            if prefix + name not in manifest.tiles:
                msg = f"the checkpoint has no tile {prefix + name!r}, which holds {piece}; it is damaged"
                raise StoreError(msg)
    ordinary = model.layers.resident
    _check_table(
        "ordinary parameters",
        state.get("ordinary"),
        lambda name, x: name in ordinary and _is_like(x, ordinary[name]),
        names=ordinary,
    )
    # Others come and go, and change their shape, as forward likes.
    persistent = model.model.state_dict().keys()
    buffers = {name: x for name, x in model.model.named_buffers() if name in persistent}
    _check_table(
        "buffers",
        state.get("buffers"),
        lambda name, x: _is_like(x, buffers.get(name, x)),
        names=buffers,
    )


def layers_of(model: OffloadedModel, state: dict[str, Any]) -> Layers:
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
            msg = f"the checkpoint has moments of {name} as {_shown(codec)}, which this version does not know"
            raise StoreError(msg)
    return model.layers.with_codecs(codecs)


def kind_of(tensor: Tensor) -> dict[str, Any]:
    """Return what another tensor must have for taking its place: shape and dtype; JSON."""
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def _check_values(model: OffloadedModel, state: dict[str, Any]) -> None:
    """Raise StoreError if what a state says of steps and moments beside the tiles cannot be the model's."""
    params = dict(model.model.named_parameters())
    if not _is_count(state.get("rounding_seed")):
        msg = "the checkpoint does not say the seed of the rounding"
        raise StoreError(msg)
    if not _is_count(state.get("num_steps")):
        msg = f"the checkpoint has done {_shown(state.get('num_steps'))} steps; it is damaged"
        raise StoreError(msg)
    _check_table(
        "steps", state.get("steps"), lambda name, x: name in params and _is_count(x)
    )
    _check_table(
        "moments",
        state.get("moments"),
        lambda name, x: (
            name in model.layers.resident
            and isinstance(x, list)
            and len(x) == 2
            and all(_is_like(y, params[name].float()) for y in x)
        ),
    )
    _check_table("notes of codecs", state.get("opaque"), lambda *_: True)
    try:
        if model.fusing is not None and state["fusing"] is not None:
            Fusing(lambda _: None).load_state_dict(state["fusing"])
    except (KeyError, TypeError) as error:
        msg = f"the checkpoint does not say which blocks were fused ({_shown(error)}); it is damaged"
        raise StoreError(msg) from error


def _check_table(
    what: str,
    table: Any,
    is_right: Callable[[str, Any], bool],
    *,
    names: Iterable[str] = (),
) -> None:
    """Raise StoreError if a table lacks one of these names, or has an entry that is not right."""
    good = isinstance(table, dict) and all(name in table for name in names)
    wrong = [x for x in table if not is_right(x, table[x])] if good else []
    if wrong or not good:
        which = f" of {_shown(wrong[0])}" if wrong else ""
        msg = f"the checkpoint's {what}{which} are not what this model can have; it is damaged"
        raise StoreError(msg)


def _check_groups(model: OffloadedModel, state: dict[str, Any]) -> None:
    """Raise ModelError if an optimizer has other groups of parameters than in a checkpoint, StoreError if no groups."""
    groups = state.get("groups", ...)
    good = isinstance(groups, list) and all(
        isinstance(group, dict) and all(isinstance(key, str) for key in group)
        for group in groups
    )
    if groups is not None and not good:
        msg = "the checkpoint's parameter groups are none; it is damaged"
        raise StoreError(msg)
    if model.optimizer is None or groups is None:
        return
    names = names_of(model.model)
    here = model.optimizer.param_groups
    found = _difference(
        [group.get("params") for group in groups],
        [[names[param] for param in group["params"]] for group in here],
        "parameter groups",
    )
    if found:
        msg = f"the checkpoint's optimizer has other parameter groups than the one here: {found}"
        raise ModelError(msg)
    for index, (mine, saved) in enumerate(zip(here, groups, strict=True)):
        try:
            config_of({**mine, **saved})
            for key, value in saved.items():
                if isinstance(mine.get(key), Tensor) and isinstance(value, Tensor):
                    value.expand_as(mine[key])
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            msg = f"the checkpoint's settings of parameter group {index} are not AdamW's ({_shown(error)}); it is damaged"
            raise StoreError(msg) from error


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_STEP


def _is_like(value: Any, tensor: Any) -> bool:
    return isinstance(value, Tensor) and kind_of(value) == kind_of(tensor)


def _difference(saved: Any, here: Any, where: str) -> str:
    """Name the first place where a JSON tree differs from the one here; empty if it does not."""
    for kind, mark in ((dict, ", {}"), (list, "[{}]")):
        if isinstance(saved, kind) and isinstance(here, kind):
            one, other = _by_place(saved), _by_place(here)
            found = (
                _difference(
                    one.get(place, _MISSING),
                    other.get(place, _MISSING),
                    where + mark.format(str(place)[:_MAX_SHOWN]),
                )
                for place in dict.fromkeys([*one, *other])
            )
            return next(filter(None, found), "")
    if saved is _MISSING:
        return f"{where} is not in the checkpoint"
    if here is _MISSING:
        return f"{where} is missing here"
    if type(saved) is type(here) and saved == here:
        return ""
    return f"{where} is {_shown(saved)} in the checkpoint and {_shown(here)} here"


def _by_place(tree: Any) -> dict[Any, Any]:
    return tree if isinstance(tree, dict) else dict(enumerate(tree))


def _shown(value: Any) -> str:
    """Return what a person sees of a value from anywhere: short, and of nested ones only the kind."""
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__}"
    return repr(value)[:_MAX_SHOWN]
