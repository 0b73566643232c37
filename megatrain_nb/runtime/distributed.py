"""Hand a model over to a cluster: weights and AdamW moments as a DCP folder; `takeover` is the way back.

[Note: keys] ``model.<name>`` for each entry of the model's ``state_dict()``, ``optim.state.<name>.step``, ``.exp_avg``
and ``.exp_avg_sq``, and ``optim.param_groups.<number>.<setting>``: what torch's ``get_model_state_dict`` and
``get_optimizer_state_dict`` give under ``model`` and ``optim``. A plain model and one with FSDP2 ask for the same keys.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain_nb.errors import ArgumentError, MegatrainError, ModelError, StoreError
from megatrain_nb.runtime.checkpoint import check_between_steps
from megatrain_nb.runtime.claim import CLAIM
from megatrain_nb.runtime.current import require_session
from megatrain_nb.runtime.dcp import Lazy, LazyPlanner, write_folder
from megatrain_nb.runtime.export import staging
from megatrain_nb.runtime.layers import names_of, parse_dtype
from megatrain_nb.runtime.offload import required_model
from megatrain_nb.runtime.piece import MOMENTS, What
from megatrain_nb.runtime.progress import byte_bar
from megatrain_nb.runtime.source import MomentSource
from megatrain_nb.store.checkpoint import sync_directory
from megatrain_nb.store.outfile import FileWriter
from megatrain_nb.store.preflight import takes_direct
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain_nb.runtime.offload import OffloadedModel

_MODEL, _OPTIM = "model", "optim"
# What AdamW's group has besides its hyper-parameters. The kernels compute what torch's fused ones compute, so a
# run that goes on with these goes on with the same bits.
_TORCHS_OWN = {
    "amsgrad": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
}
SETTINGS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "maximize",
    "decoupled_weight_decay",
    "initial_lr",
)


def export_distributed(
    folder: str | Path,
    model: nn.Module | None = None,
    *,
    dtype: torch.dtype | str | None = None,
) -> Path:
    """Write weights and AdamW moments so that ``torch.distributed.checkpoint.load`` reads them.

    Parameters
    ----------
    folder
        Of that name nothing may be there yet. It appears when it is whole.
    model
        From `wrap` or an `mt.Trainer`; None: the only one in the session.
    dtype
        Of the parameters; None: fp32, for a model in bf16 the exact master. ``torch.bfloat16`` rounds them.

    Returns
    -------
    Path
        The folder, absolute.

    Raises
    ------
    ArgumentError
        The folder exists, or another dtype.
    SessionError
        No session is open, or a step is not complete.
    ModelError
        The model is not in the session, or has a state that is no tensor.
    StoreError
        The disk is full or failed; nothing of the folder is left.

    Notes
    -----
    Moments that are compressed are decoded, and written as fp32. One parameter is in RAM at a time, beside the
    session's budget. A plain run and one with FSDP2 that load it go on as this one would: bit for bit with
    fp32 moments and the same order of sums. See docs/checkpoints.md.
    """
    offloaded = model_of(model)
    wanted = parse_dtype(dtype) or torch.float32
    folder = Path(folder).expanduser().absolute()
    if os.path.lexists(folder):
        msg = f"{folder} exists; give the name of a folder that is to be made"
        raise ArgumentError(msg)
    temporary = folder.with_name(f".{folder.name}.part")
    with CLAIM.held("mt.export_distributed"):
        check_between_steps(offloaded)
        offloaded.finish_updates()
        state_dict, lazy, aliases = _state_dict(offloaded, wanted)
        total = sum(each.nbytes for each in lazy.values())
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _check_room(temporary, total)
            with (
                byte_bar(total, "Exporting") as bar,
                staging(offloaded, total) as pieces,
                FileWriter(pieces, direct=takes_direct(temporary)) as file,
            ):
                planner = LazyPlanner(lazy, aliases, bar.update)
                write_folder(temporary, state_dict, planner, file)
            sync_directory(temporary)
            temporary.rename(folder)
            sync_directory(folder.parent)
        except MegatrainError:
            raise
        except (
            OSError,
            RuntimeError,
        ) as error:  # torch's writer makes one of the other
            msg = (
                f"writing {format_bytes(total)} to {folder} failed: {error}; nothing of it is left. Make room, and "
                "export again"
            )
            raise StoreError(msg) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        offloaded.note_saved()
    return folder


def _check_room(parent: Path, total: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < total:
        msg = f"{format_bytes(total)} are needed in {parent}, and {format_bytes(free)} are free; make room, or give another disk"
        raise StoreError(msg)


def _state_dict(
    offloaded: OffloadedModel, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Lazy], dict[str, str]]:
    """Return a state dict of placeholders, what they stand for by key, and the keys of tied parameters."""
    lazy: dict[str, Lazy] = {}
    aliases: dict[str, str] = {}
    weights: dict[str, Tensor] = {}
    firsts: dict[int, str] = {}
    for name, tensor in state_entries(offloaded.model):
        first = firsts.setdefault(id(tensor), name)
        if first != name:
            aliases[f"{_MODEL}.{name}"] = f"{_MODEL}.{first}"
            continue
        lazy[f"{_MODEL}.{name}"] = _lazy_weight(offloaded, tensor, dtype)
        weights[name] = lazy[f"{_MODEL}.{name}"].placeholder()
    state: dict[str, Any] = {_MODEL: weights}
    if offloaded.optimizer is not None:
        names = names_of(offloaded.model)
        states = {}
        for param in trained(offloaded):
            moments = {}
            for what in MOMENTS:
                key = f"{_OPTIM}.state.{names[param]}.{what.value}"
                lazy[key] = _lazy_moment(offloaded, param, what)
                moments[what.value] = lazy[key].placeholder()
            step = torch.tensor(float(offloaded.adam.steps.get(param, 0)))
            states[names[param]] = {"step": step} | moments
        groups = [
            {key: group[key] for key in SETTINGS if key in group}
            | _TORCHS_OWN
            | {"params": [names[param] for param in group["params"]]}
            for group in offloaded.optimizer.param_groups
        ]
        state[_OPTIM] = {"state": states, "param_groups": groups}
    return state, lazy, aliases


def state_entries(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return what ``state_dict()`` holds, the very parameters and buffers."""
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in model.state_dict():
        if name not in params and name not in buffers:
            msg = f"{name} of {type(model).__name__} is neither a parameter nor a buffer, so it cannot be handed over"
            raise ModelError(msg)
        yield name, params.get(name, buffers.get(name))  # type: ignore[misc]


def _lazy_weight(offloaded: OffloadedModel, tensor: Tensor, dtype: torch.dtype) -> Lazy:
    home = offloaded.layers.homes.get(tensor)  # type: ignore[call-overload]
    if home is None:
        whose = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
        return _lazy_plain(tensor.detach(), whose)
    source = offloaded.source(tensor)  # type: ignore[arg-type]
    return Lazy(
        home.spec.shape,
        dtype,
        partial(source.master().opened, write=False),
        (0, home.pack.index),
    )


def _lazy_moment(offloaded: OffloadedModel, param: nn.Parameter, what: What) -> Lazy:
    home = offloaded.layers.homes.get(param)
    if home is None:
        moments = offloaded.adam.moments.get(param)
        values = torch.zeros(param.shape)
        if moments is not None:
            values = moments[MOMENTS.index(what)]
        return _lazy_plain(values, torch.float32)
    source = MomentSource(offloaded, param, home, what)
    piece = 0 if home.pack.encoded else MOMENTS.index(what)
    return Lazy(
        home.spec.shape,
        torch.float32,
        partial(source.opened, write=False),
        (1, home.pack.index, piece),
    )


def _lazy_plain(values: Tensor, dtype: torch.dtype) -> Lazy:
    @contextmanager
    def opened() -> Iterator[Tensor]:
        yield values.cpu()

    return Lazy(tuple(values.shape), dtype, opened, (0, -1))


def model_of(model: nn.Module | None) -> OffloadedModel:
    """Return the record of a model, or of the only one in the open session.

    Raises
    ------
    ArgumentError
        There are several.
    ModelError
        It is not in the session.
    SessionError
        There is no session, or it has no model.
    """
    session = require_session()
    if model is not None:
        offloaded = required_model(model)
        offloaded.executor.check_usable()
        return offloaded
    models = session.models.usable()
    if len(models) > 1:
        msg = f"{len(models)} models are in the session; say which one: model=..."
        raise ArgumentError(msg)
    return models[0]


def trained(offloaded: OffloadedModel) -> list[nn.Parameter]:
    """Return the parameters of the optimizer that have a state as soon as it has stepped."""
    assert offloaded.optimizer is not None
    return [
        param
        for group in offloaded.optimizer.param_groups
        for param in group["params"]
        if param.requires_grad or param in offloaded.adam.steps
    ]
