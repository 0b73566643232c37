"""What a checkpoint holds beside its tiles, read back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors.torch

from megatrain_nb.errors import StoreError
from megatrain_nb.runtime.tree import from_json

if TYPE_CHECKING:
    from megatrain_nb.store.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds beside its tiles.

    Attributes
    ----------
    identity
        What the models are, see `megatrain_nb.runtime.modelstate.identity`.
    models, objects
        States of the models, and by name those of the registered objects.
    random
        Random states.
    lr_factor
        As in `megatrain_nb.runtime.controls.Controls`.
    """

    identity: Any
    models: list[dict[str, Any]]
    objects: dict[str, Any]
    random: dict[str, Any]
    lr_factor: float


def read_state(checkpoint: Checkpoint) -> Saved:
    """Return what a checkpoint holds beside its tiles.

    Raises
    ------
    StoreError
        It is damaged.
    """
    content, data = checkpoint.read()
    try:
        tensors = safetensors.torch.load(data)
        return Saved(
            identity=content["identity"],
            models=[from_json(each, tensors) for each in content["models"]],
            objects=from_json(content["objects"], tensors),
            random=from_json(content["random"], tensors),
            lr_factor=_lr_factor(content["lr_factor"]),
        )
    except (
        safetensors.SafetensorError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        msg = f"{checkpoint!r} in {checkpoint.folder} cannot be read: {error!r}"
        raise StoreError(msg) from error


def _lr_factor(value: Any) -> float:
    if type(value) is not float or not 0 <= value < math.inf:
        msg = f"lr_factor {str(value)[:80]}"
        raise ValueError(msg)
    return value
