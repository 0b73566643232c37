"""What a checkpoint holds beside its tiles, read back; and random states."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch

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


def random_state() -> dict[str, Any]:
    """Return the random states of Python, numpy and torch."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what transformers seeds
        "torch": torch.get_rng_state(),
        "cuda": [],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the random states that a checkpoint has.

    Raises
    ------
    StoreError
        They are damaged.
    """
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        torch.set_rng_state(state["torch"])
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        msg = f"the checkpoint's random states are damaged: {error!r}"
        raise StoreError(msg) from error
