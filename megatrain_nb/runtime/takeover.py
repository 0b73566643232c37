"""Take weights and AdamW moments over from a DCP folder: what `distributed` wrote, or a plain or FSDP2 run.

[Note: what is looked for] The folder's keys are those of a state dict; under which names model and optimizer were
put into it is up to who saved it. So the model is found by the names of its parameters, whatever stands before
them, and a parameter's moments by ``state.<name>.exp_avg``. All of that is found and compared before anything changes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from megatrain_nb.errors import ModelError, StoreError
from megatrain_nb.optim.config import AdamWConfig
from megatrain_nb.runtime.checkpoint import check_between_steps
from megatrain_nb.runtime.claim import CLAIM
from megatrain_nb.runtime.dcpread import Folder
from megatrain_nb.runtime.distributed import (
    SETTINGS,
    model_of,
    state_entries,
    trained,
)
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.layers import names_of
from megatrain_nb.runtime.piece import MOMENTS
from megatrain_nb.runtime.source import MomentSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain_nb.runtime.offload import OffloadedModel


def import_distributed(
    folder: str | Path,
    model: nn.Module | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Take weights and AdamW moments over from a folder of ``torch.distributed.checkpoint``.

    Parameters
    ----------
    folder
        From `export_distributed`, or from ``torch.distributed.checkpoint.save`` of a plain or an FSDP2 run that saved
        what ``get_model_state_dict`` and ``get_optimizer_state_dict`` give, under any names.
    model
        From `wrap` or an `mt.Trainer`; None: the only one in the session.
    weights_only
        Only parameters and buffers.

    Raises
    ------
    ArgumentError
        Not such a folder.
    SessionError
        No session is open, or a step is not complete.
    ModelError
        It is of another model or optimizer: names the first difference. Nothing has changed.
    StoreError
        It is damaged, or holds what no such folder holds. If that is found after the first weight was taken over, the
        model must not be used any more.

    Notes
    -----
    Nothing that is in the folder runs: the pickle of its metadata is read as data, see docs/checkpoints.md.
    Compressed moments are encoded as they come, which rounds once. One parameter is in RAM at a time, beside the
    session's budget; where moments are compressed, both moments of one inside it.
    """
    offloaded = model_of(model)
    room = offloaded.session.saved.room_bytes()
    found = Folder(Path(folder).expanduser().absolute(), most_bytes=room)
    with (
        CLAIM.held("mt.import_distributed"),
        interrupts_wait(offloaded.session.stop_event, breakable=False),
    ):
        check_between_steps(offloaded)
        weights = _find_weights(offloaded.model, found)
        moments: dict[nn.Parameter, str] = {}
        groups: list[dict[str, Any]] | None = None
        if not weights_only:
            moments = _find_moments(offloaded, found)
            groups = _find_groups(offloaded, found)
        offloaded.finish_updates()
        offloaded.executor.weights_change()
        with offloaded.pager.must_end(f"taking {found.path} over"):
            for key, tensor in weights.items():
                _take_weight(offloaded, found, key, tensor)
            if not weights_only:
                _take_optimizer(offloaded, found, moments, groups)
            offloaded.pager.barrier()


def _find_weights(model: nn.Module, found: Folder) -> dict[str, Tensor]:
    """Return the model's tensors by key; of tied ones, and where the folder has one of their names, that one."""
    entries = list(state_entries(model))
    head = _head_of([name for name, _ in entries], found)
    taken: dict[int, str] = {}
    weights = {}
    for name, tensor in entries:
        key = head + name
        if key in found.tensors:
            _check_shape(found, key, tensor)
            if taken.setdefault(id(tensor), name) == name:
                weights[key] = tensor
    for name, tensor in entries:
        if id(tensor) not in taken:
            msg = f"{found.path} has no {head}{name}; make the model as the one that was saved"
            raise ModelError(msg)
    known = {head + name for name, _ in entries}
    strange = sorted(k for k in found.tensors if k.startswith(head) and k not in known)
    if head and strange:
        msg = f"{found.path} has {strange[0]}, which {type(model).__name__} has not; make the model as the one that was saved"
        raise ModelError(msg)
    return weights


def _head_of(names: list[str], found: Folder) -> str:
    """Return what the keys of the model's tensors begin with."""
    first = names[0]
    keys = [key for key in found.tensors if key == first or key.endswith(f".{first}")]
    heads = sorted(key.removesuffix(first) for key in keys)
    whole = [h for h in heads if all(h + name in found.tensors for name in names)]
    heads_left = whole or heads
    if len(heads_left) == 1:
        return heads_left[0]
    if not heads_left:
        msg = f"{found.path} has no {first}; it is of another model, or was not saved by the names of its parameters"
        raise ModelError(msg)
    msg = f"{found.path} holds several such models ({', '.join(map(repr, heads_left))}); save one of them alone"
    raise ModelError(msg)


def _check_shape(found: Folder, key: str, tensor: Tensor) -> None:
    shape, dtype = found.tensors[key]
    if shape != tuple(tensor.shape):
        msg = f"{key} has shape {shape} in {found.path}, and {tuple(tensor.shape)} here"
        raise ModelError(msg)
    if dtype.is_floating_point != tensor.dtype.is_floating_point:
        msg = f"{key} is {dtype} in {found.path}, and {tensor.dtype} here"
        raise ModelError(msg)


def _find_moments(offloaded: OffloadedModel, found: Folder) -> dict[nn.Parameter, str]:
    """Return the head of the keys of each parameter's state; a parameter that was never updated has none."""
    if offloaded.optimizer is None:
        msg = "make the optimizer first (mt.wrap, mt.Trainer), or take the weights alone with weights_only=True"
        raise ModelError(msg)
    names = names_of(offloaded.model)
    tail = "." + MOMENTS[0].value
    heads = [key.removesuffix(tail) for key in found.tensors if key.endswith(tail)]
    moments = {}
    for param in trained(offloaded):
        mine = [x for x in heads if f".{x}".endswith(f"state.{names[param]}")]
        if len(mine) > 1:
            msg = (
                f"{found.path} has several states of {names[param]}: {', '.join(mine)}"
            )
            raise ModelError(msg)
        for head in mine:
            if f"{head}.max_exp_avg_sq" in found.tensors:
                msg = f"{head} has max_exp_avg_sq (amsgrad), which AdamW here has not; take the weights alone with weights_only=True"
                raise ModelError(msg)
            for what in MOMENTS:
                key = f"{head}.{what.value}"
                if key not in found.tensors:
                    msg = f"{found.path} has {head}{tail}, but no {key}"
                    raise ModelError(msg)
                _check_shape(found, key, param)
            if found.tensors.get(f"{head}.step", ((1,), None))[0] != ():
                msg = f"{found.path} does not say how many steps {head} has had"
                raise ModelError(msg)
            moments[param] = head
    if not moments:
        msg = f"{found.path} holds no state of AdamW; take the weights alone with weights_only=True"
        raise ModelError(msg)
    return moments


def _find_groups(
    offloaded: OffloadedModel, found: Folder
) -> list[dict[str, Any]] | None:
    """Return the settings of each of the optimizer's groups, checked; None if the folder has no groups.

    Raises
    ------
    ModelError
        It has other groups.
    """
    mark = "param_groups."
    keys = [x for x in found.objects if x.endswith(".params") and mark in x]
    if not keys:
        return None
    saved = {}
    for key in keys:
        value = found.read_object(key)
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            msg = f"{key} in {found.path} is not a list of names"
            raise ModelError(msg)
        saved[key.removesuffix("params")] = set(value)
    names = names_of(offloaded.model)
    assert offloaded.optimizer is not None
    groups = []
    for number, group in enumerate(offloaded.optimizer.param_groups):
        mine = {names[param] for param in group["params"]}
        head = next((head for head, each in saved.items() if each == mine), None)
        if head is None:
            msg = (
                f"{found.path} has no parameter group with the {len(mine)} parameters of group {number} here; make the "
                "optimizer's groups as they were, or take the weights alone with weights_only=True"
            )
            raise ModelError(msg)
        groups.append(_settings(found, head, group))
    return groups


def _settings(found: Folder, head: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group: those that are there, of the kind that they have."""
    settings: dict[str, Any] = {}
    for name in SETTINGS:
        key = head + name
        if key in found.tensors and found.tensors[key][0] == ():
            settings[name] = torch.zeros((), dtype=torch.float64)
            found.read_into(key, settings[name])
            settings[name] = float(settings[name])
        elif key in found.objects:
            settings[name] = found.read_object(key)
    merged = dict(group) | settings
    try:
        beta1, beta2 = (float(beta) for beta in merged["betas"])
        AdamWConfig(
            lr=float(merged["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(merged["eps"]),
            weight_decay=float(merged["weight_decay"]),
        )
        float(merged.get("initial_lr", 0.0))
        for name in ("maximize", "decoupled_weight_decay"):
            merged[name] = {True: True, False: False}[merged[name]]
    except (TypeError, ValueError, KeyError) as error:
        msg = f"the settings {head}* in {found.path} are not AdamW's: {error!r}"
        raise ModelError(msg) from error
    return settings


def _take_weight(
    offloaded: OffloadedModel, found: Folder, key: str, tensor: Tensor
) -> None:
    if tensor in offloaded.layers.homes:
        source = offloaded.source(tensor)  # type: ignore[arg-type]
        with source.master().opened(write=True) as values:
            found.read_into(key, values)
    else:
        with torch.no_grad():
            found.read_into(key, tensor.detach())


def _take_optimizer(
    offloaded: OffloadedModel,
    found: Folder,
    moments: Mapping[nn.Parameter, str],
    groups: list[dict[str, Any]] | None,
) -> None:
    optimizer = offloaded.optimizer
    assert optimizer is not None
    offloaded.adam.reset()
    optimizer.state.clear()
    for param, head in moments.items():
        step = torch.zeros((), dtype=torch.float64)
        found.read_into(f"{head}.step", step)
        if not (math.isfinite(step) and float(step) == int(step) >= 0):
            msg = f"{head}.step in {found.path} is {float(step)}"
            raise StoreError(msg)
        if step:
            offloaded.adam.steps[param] = int(step)
    _take_moments(offloaded, found, moments)
    offloaded.steps.done = max(offloaded.adam.steps.values(), default=0)
    optimizer.note_state()
    if groups is None:
        offloaded.session.note(
            f"{found.path} has no parameter groups by number: learning rate and other settings stay as they are here"
        )
        return
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        for name, value in settings.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)  # others may hold this very tensor
            else:
                group[name] = tuple(value) if name == "betas" else value


def _take_moments(
    offloaded: OffloadedModel, found: Folder, moments: Mapping[nn.Parameter, str]
) -> None:
    """Take moments over in the order in which they lie, so that each piece is opened once."""
    plain: list[tuple[int, int, nn.Parameter]] = []
    for param, head in moments.items():
        home = offloaded.layers.homes.get(param)
        if home is None:
            for what in MOMENTS:
                found.read_into(
                    f"{head}.{what.value}", offloaded.adam.moment(param, what)
                )
        elif home.pack.encoded:
            _take_encoded(offloaded, found, param, head)
        else:
            plain += [(home.pack.index, number, param) for number in (0, 1)]
    for _, number, param in sorted(plain, key=lambda each: each[:2]):
        what = MOMENTS[number]
        source = MomentSource(offloaded, param, offloaded.layers.homes[param], what)
        with source.opened(write=True) as values:
            found.read_into(f"{moments[param]}.{what.value}", values)


def _take_encoded(
    offloaded: OffloadedModel, found: Folder, param: nn.Parameter, head: str
) -> None:
    """Encode both moments together; that they are more than one parameter, the session's budget bears."""
    spec = offloaded.layers.homes[param].spec
    with offloaded.pager.room(8 * spec.numel, "moments to encode") as slab:
        pair = slab.view(np.float32, 0, 2 * spec.numel).reshape(2, spec.numel)
        both = [torch.from_numpy(row).view(spec.shape) for row in pair]
        for values, what in zip(both, MOMENTS, strict=True):
            found.read_into(f"{head}.{what.value}", values)
        offloaded.adam.set_moments(param, *both)
